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
  std::vector<uint8_t> given, small, dropped, output, gradient, tangent, late;  // per value; late: depends on a tangent
  std::vector<int32_t> wanted;                     // values that backward reads and that may cross
  std::vector<int32_t> late_wanted;                // gradients that depend on no tangent: brought at the end
  std::vector<int32_t> forward_ops, backward_ops;
  std::vector<int32_t> forward_state, forward_keys;  // groups of the plain forward schedule
  Rows neighbours;                                   // per value: operands of its producer, then results of its readers before backward
  int64_t tangent_bytes;
};

struct Span {
  int32_t start, length;
};

struct InPlace {
  int32_t position, start, length, value;
};

struct Scratch {
  explicit Scratch(const Graph& graph);
  std::vector<uint8_t> crossing, seen, available, ran, again, queued;
  std::vector<int32_t> stack, missing, forward, backward;
  std::vector<int32_t> state, made_in, base, keys;
  std::vector<Span> source;
  std::vector<int32_t> arena, last, mark, loaded, written;
  std::vector<std::pair<int32_t, int32_t>> launched;  // open addressing: key, epoch
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

// Fills `state` and `keys` for one schedule: who reads each value, and the loop nest of each op.
void find_groups(const Graph& graph, const std::vector<int32_t>& schedule, std::vector<int32_t>& made_in, std::vector<int32_t>& base,
                 std::vector<int32_t>& state, std::vector<int32_t>& keys);

}  // namespace dyngran
