// One planning problem as flat arrays, and the working memory of one evaluation. Built once per problem, never changed afterwards.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace dyngran {

struct Rows {  // rows of integers: row i is items[starts[i] .. starts[i + 1])
  std::vector<int32_t> starts, items;
  const int32_t* begin(int row) const { return items.data() + starts[row]; }
  const int32_t* end(int row) const { return items.data() + starts[row + 1]; }
  int size(int row) const { return starts[row + 1] - starts[row]; }
};

struct Graph {
  int num_values, num_ops, num_spaces;
  bool fused;
  double launch_us, bytes_per_us;
  Rows reads, writes;
  Rows needs;                                      // per op: the operands that neither are given nor depend on a tangent
  std::vector<int64_t> live, full;                 // bytes per value: as counted in the timeline, as moved by a kernel
  std::vector<int64_t> workspace, rerun_workspace; // bytes per op
  std::vector<double> cost;                        // us per op
  std::vector<uint8_t> fusible, reduction, pinned, never_saved, early_ran;  // per op; early_ran: a FORWARD op
  std::vector<int32_t> space, producer;            // iteration space of an op; op that makes a value, -1 if it is given
  std::vector<int32_t> node_count;                 // per op: buffers that a scheduler orders, as in passes/fuse.py
  std::vector<uint8_t> given, small, dropped, output, gradient, tangent, late;  // per value; late: depends on a tangent
  std::vector<int32_t> wanted;                     // values that backward reads and that may cross
  std::vector<int32_t> late_wanted;                // gradients that depend on no tangent: brought at the end
  std::vector<int32_t> forward_ops, backward_ops;
  std::vector<int32_t> forward_state, forward_nests;  // of the plain forward schedule
  Rows neighbours;                                   // per value: operands of its producer, then results of its readers before backward
  int64_t tangent_bytes;
};

struct Span {
  int32_t start, length;
};

struct InPlace {
  int32_t position, start, length, value;
};

// The loop nests of one schedule, by their kind: (external kernels on the way, iteration space).
struct Nests {
  explicit Nests(int num_ops);
  // The nest, named by its first op, that an op of this kind belongs to when so many nodes were ordered before it.
  int find(int kind, int op, int num_nodes);
  void clear() { ++epoch_; }

 private:
  struct Slot {
    int32_t kind, epoch, nest, began;
  };
  std::vector<Slot> slots_;  // open addressing
  int32_t epoch_ = 1;
};

struct Scratch {
  explicit Scratch(const Graph& graph);
  std::vector<uint8_t> crossing, seen, available, ran, again, queued;
  std::vector<int32_t> stack, missing, forward, backward;
  std::vector<int32_t> state, made_in, base, nest_of;
  std::vector<Span> source;
  std::vector<int32_t> arena, last, mark, loaded, written;
  std::vector<int32_t> launched;  // per op: the last epoch in which the nest that it names was launched
  Nests nests;
  std::vector<InPlace> in_place;
  std::vector<std::pair<int32_t, int64_t>> deaths;
  std::vector<int64_t> change, extra;
  std::vector<int32_t> kernel_ops;
  bool is_plain = false;
  int stamp = 0, epoch = 0;
};

struct Outcome {
  int64_t peak_bytes, forward_peak_bytes, backward_peak_bytes, saved_bytes;  // static bytes excluded
  double time_us, recompute_us;
  int32_t num_recomputed, num_kernels;
  int32_t num_forward, peak_position;
  int64_t work;  // ops and operands looked at
};

// Peak and time of a set of saved values (one byte per value). Leaves what really crosses in scratch.crossing and, per kernel, the op,
// scratch.change and scratch.extra for `live_curve`.
Outcome evaluate(const Graph& graph, Scratch& scratch, const uint8_t* wished);

// Fills scratch.crossing with what really crosses of `wished`; `evaluate` is this and then the replay of scratch.crossing.
void normalize(const Graph& graph, Scratch& scratch, const uint8_t* wished);
Outcome evaluate_crossing(const Graph& graph, Scratch& scratch);

// Per op, the buffers that a fusing code generator's scheduler orders: `node_counts` of passes/fuse.py.
std::vector<int32_t> count_nodes(const Graph& graph);

// Fills `state` and `nest_of` for one schedule: who reads each value, and the loop nest of each op.
void find_groups(const Graph& graph, const std::vector<int32_t>& schedule, std::vector<int32_t>& made_in, std::vector<int32_t>& base,
                 std::vector<int32_t>& state, std::vector<int32_t>& nest_of, Nests& nests);

}  // namespace dyngran
