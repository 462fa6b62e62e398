// Which ops of a schedule share a loop nest: the rules of passes/fuse.py.
#pragma once

#include "graph.h"

namespace dyngran {

constexpr int kMaxInlineReads = 4, kMaxAccumulatedReads = 8, kMaxNodesApart = 64;  // as in passes/fuse.py

// Per op, the buffers that a fusing code generator's scheduler orders: `node_counts` of passes/fuse.py.
std::vector<int32_t> count_nodes(const Graph& graph);

// The newest loop nest of each kind, (external kernels on the way, iteration space), along one schedule.
class Nests {
 public:
  explicit Nests(int num_ops);
  // The nest, named by its first op, that an op of this kind belongs to when so many nodes were ordered before it.
  int find(int kind, int op, int num_nodes);
  // Says that a nest of this kind began at an op before which so many nodes were ordered.
  void begin(int kind, int op, int num_nodes) { slot(kind) = {kind, epoch_, op, num_nodes}; }
  void clear() { ++epoch_; }

 private:
  struct Slot {
    int32_t kind, epoch, nest, began;
  };
  Slot& slot(int kind);
  std::vector<Slot> slots_;  // open addressing
  int32_t epoch_ = 1;
};

}  // namespace dyngran
