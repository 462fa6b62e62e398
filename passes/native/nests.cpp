#include "nests.h"

#include <algorithm>

namespace dyngran {

std::vector<int32_t> count_nodes(const Graph& g) {
  std::vector<uint8_t> is_ordered(g.num_values);
  for (int value = 0; value < g.num_values; ++value) is_ordered[value] = g.output[value] | g.gradient[value];
  for (int op = 0; op < g.num_ops; ++op)
    for (auto p = g.reads.begin(op); p != g.reads.end(op); ++p)
      if (g.producer[*p] >= 0 && (!g.fusible[op] || g.space[g.producer[*p]] != g.space[op])) is_ordered[*p] = 1;
  std::vector<int32_t> counts(g.num_ops);
  for (int op = 0; op < g.num_ops; ++op) {
    if (!g.fusible[op] || g.reduction[op]) {
      counts[op] = std::max(1, g.writes.size(op));
    } else {
      for (auto p = g.writes.begin(op); p != g.writes.end(op); ++p) counts[op] |= is_ordered[*p];
    }
  }
  return counts;
}

Nests::Nests(int num_ops) {
  size_t size = 16;
  while (size < 4 * size_t(num_ops)) size *= 2;
  slots_.assign(size, {-1, 0, 0, 0});
}

Nests::Slot& Nests::slot(int kind) {
  const size_t mask = slots_.size() - 1;
  size_t at = size_t(kind) & mask;  // kinds that follow one another lie side by side
  while (slots_[at].epoch == epoch_ && slots_[at].kind != kind) at = (at + 1) & mask;
  return slots_[at];
}

int Nests::find(int kind, int op, int num_nodes) {
  Slot& found = slot(kind);
  if (found.epoch != epoch_ || num_nodes - found.began > kMaxNodesApart) found = {kind, epoch_, op, num_nodes};
  return found.nest;
}

}  // namespace dyngran
