// One planning problem as flat arrays. Built once per problem, never changed afterwards.
#pragma once

#include <cstdint>
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
  int segment_ops;  // of a pass that are replayed together: see replay.h
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
  Rows readers;                                      // per value: ops that read it, each once
  Rows forms;                                        // per value: what may be saved in its stead, see Problem.forms; the first one counts
  std::vector<int32_t> form_of, loader;              // per value: what it is a stored form of, -1 if of none; the op that loads it then
  std::vector<int32_t> fetch;                        // per op that loads: the backward op just before which it runs at the latest, or -1
  std::vector<double> copy_us;                       // per stored form: how long its copy takes, beside what runs from the load on
  std::vector<int32_t> copied;                       // the stored forms that are copied
  Rows fetched;                                      // per backward op: stored forms of what is loaded just before it
  Rows barred;                                       // per stored form: ops that must not run again on what is loaded from it
  Rows again;                                        // per stored form: ops of which a part runs again where it is loaded
  Rows neighbours;                                   // per value: operands of its producer, then results of its readers before backward
  int64_t tangent_bytes;
};

struct Outcome {
  int64_t peak_bytes, forward_peak_bytes, backward_peak_bytes, saved_bytes;  // static bytes excluded
  double time_us, recompute_us;
  int32_t num_recomputed, num_kernels;
  int32_t num_forward, peak_position;
  int64_t work;  // ops, and operands of loops, looked at to come here from the plan before
};

}  // namespace dyngran
