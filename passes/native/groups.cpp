// The loop nests of a segment, and what its operands are read by.
#include <algorithm>

#include "pass.h"

namespace dyngran {

Pass::Grouped& Pass::note_flags(int value) {
  Grouped& grouped = grouped_[value];
  if (grouped.noted_at != group_stamp_) {
    grouped.noted_at = group_stamp_;
    grouped.flags = flags_of(grouped);
    noted_.push_back(value);
  }
  return grouped;
}

// What the operands of a segment's ops were said to be read by is taken back.
void Pass::ungroup(const Segment& segment) {
  const uint8_t* elsewhere = segment.elsewhere.data();
  for (const int op : segment.grouped) {
    for (auto p = graph_.reads.begin(op); p != graph_.reads.end(op); ++p) {
      if (graph_.given[*p]) continue;
      Grouped& grouped = note_flags(*p);
      if (graph_.fusible[op]) {
        --grouped.readers;
        grouped.elsewhere -= *elsewhere++;
      } else {
        --grouped.outside;
      }
    }
  }
}

void Pass::group(int number) {
  Segment& segment = segments[number];
  unmark(number, kGroups);
  ++group_stamp_;
  noted_.clear();
  if (!is_whole_) ungroup(segment);
  if (warm_ != number) {
    nests_.clear();
    nodes_ = 0;
    for (int before = first_in_window(number); before < number; ++before) {
      for (const int op : segments[before].ops) {
        if (nest_of_[op] == op) nests_.begin(kind_of_[op], op, nodes_);
        nodes_ += graph_.node_count[op];
      }
    }
  }
  warm_ = number + 1;
  bool differs = is_whole_ || segment.grouped != segment.ops;  // for the kernels here, and
  bool opens_others = differs;                                 // for the nests that later segments find open
  const int nodes_before = nodes_;
  segment.grouped = segment.ops;
  segment.elsewhere.clear();
  segment.continues = false;
  for (const int op : segment.ops) {
    int depth = 0;
    for (auto p = graph_.reads.begin(op); p != graph_.reads.end(op); ++p) depth = std::max(depth, grouped_[*p].base);
    const int kind = depth + graph_.space[op], nest = nests_.find(kind, op, nodes_);
    nodes_ += graph_.node_count[op];
    differs |= nest_of_[op] != nest;
    opens_others |= nest_of_[op] != nest || kind_of_[op] != kind;
    nest_of_[op] = nest;
    kind_of_[op] = kind;
    segment.continues |= ran_in[nest] != number;
    const bool fusible = graph_.fusible[op];
    for (auto p = graph_.reads.begin(op); p != graph_.reads.end(op); ++p) {
      if (graph_.given[*p]) continue;
      Grouped& grouped = is_whole_ ? grouped_[*p] : note_flags(*p);
      if (fusible) {
        const uint8_t is_elsewhere = grouped.made_in != nest;
        ++grouped.readers;
        grouped.elsewhere += is_elsewhere;
        segment.elsewhere.push_back(is_elsewhere);
      } else {
        ++grouped.outside;
      }
    }
    const int base = fusible ? depth : depth + graph_.num_spaces;
    for (auto p = graph_.writes.begin(op); p != graph_.writes.end(op); ++p) {
      Grouped& grouped = grouped_[*p];
      if (is_made_elsewhere(*p, op) || (grouped.base == base && grouped.made_in == nest)) continue;
      grouped.base = base;
      grouped.made_in = nest;
      if (!is_whole_) mark_readers(*p, kGroups, number);
    }
  }
  work_ += int64_t(segment.ops.size());
  segment.num_nodes = nodes_ - nodes_before;
  for (const int value : noted_) {
    const int maker = maker_[value];
    if (maker >= 0 && grouped_[value].flags != flags_of(grouped_[value])) mark(ran_in[maker], kKernels);
  }
  if (is_whole_) return;
  if (differs) mark(number, kKernels);
  if (!opens_others) return;
  int num_nodes = 0;
  for (int after = number + 1; after < num_segments && num_nodes <= kMaxNodesApart; ++after) {
    mark(after, kGroups);
    num_nodes += segments[after].num_nodes;
  }
}

}  // namespace dyngran
