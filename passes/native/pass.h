// One pass of a step, forward or backward, in segments: a segment is folded into kernels again only if what it sees has changed.
//
// The rules are those of passes/fuse.py and passes/simulate.py, which are the readable truth; tests/test_simulate.py holds both equal.
// A pass is a list of ops, cut into segments. For each segment three things are kept, each made from those above it:
//   groups   the loop nest of each op, and what its operands are read by
//   kernels  what is inlined, what is written, bytes and time of each kernel
//   bytes    what is live while each kernel runs, beside what is live when the segment begins
// Whoever changes something marks the segments that look at it; marks that were not needed cost time and nothing else.
#pragma once

#include <algorithm>
#include <utility>

#include "nests.h"

namespace dyngran {

struct Span {
  int32_t start = -1, length = 1;  // in the arena of the segment that makes a value; start -1: the value itself
};

struct Segment {
  std::vector<int32_t> ops;  // in the order in which they run

  std::vector<int32_t> grouped;    // the ops as they were when `elsewhere` was filled
  std::vector<uint8_t> elsewhere;  // per operand of `grouped`: another nest has made it
  int32_t num_nodes = 0;
  bool continues = false;  // some nest of an earlier segment

  struct Touch {
    int32_t value, position;  // the last kernel here that reads or writes the value
    int32_t first, second;    // the first two, -1 if there is one only
  };
  struct InPlace {
    int32_t position, start, length, value;
  };
  std::vector<int32_t> arena;  // what inlined results read from memory
  std::vector<std::pair<int32_t, int32_t>> loads;  // value and nest
  std::vector<int32_t> launched;  // nests
  std::vector<int32_t> kernel_ops;
  std::vector<double> kernel_us;
  std::vector<int64_t> born, extra;  // bytes per kernel: allocated, held beside that while it runs
  std::vector<Touch> touches;
  std::vector<InPlace> in_place;
  double time_us = 0.0, recompute_us = 0.0;
  int32_t num_again = 0;

  std::vector<int64_t> live;  // bytes per kernel, beside what is live when the segment begins
  int64_t end_bytes = 0, peak_bytes = 0, idle_bytes = 0;
  int32_t peak_position = -1;
};

class Pass {
 public:
  enum Mark : uint8_t { kSchedule = 1, kGroups = 2, kKernels = 4, kBytes = 8 };

  // `maker`: per value the op that makes it in this pass, -1 if it is given.
  Pass(const Graph& graph, bool is_backward, int num_segments, const std::vector<uint8_t>& crossing, const std::vector<int32_t>& maker);

  void mark(int segment, int marks) {
    if (segment >= 0) marks_[segment] |= uint8_t(marks & all_marks_);
  }
  void mark_readers(int value, int marks, int after = -1);  // the segments beyond `after` in which ops run that read a value
  bool is_marked(int segment, Mark kind) const { return marks_[segment] & kind; }
  int num_marked() const { return int(marks_.size() - std::count(marks_.begin(), marks_.end(), 0)); }
  void unmark(int segment, Mark kind) { marks_[segment] &= uint8_t(~kind); }

  void mark_bytes_of(int value);  // the segments that touch a value: when it dies has changed

  // A value is in memory from the start, or nobody makes it any more: what was known of it is forgotten.
  void forget(int value);
  // Of everything: what follows is the first replay again, which is faster than many changes.
  void forget_all();
  // To be called after `crossing` has changed at a value.
  void change_crossing(int value);

  // Groups and folds what is marked; ops that also run in `forward` run again. Returns op visits.
  int64_t fold(const Pass* forward);
  // Bytes of one segment; `idle_bytes` die after its first kernel.
  void count_bytes(int segment, int64_t idle_bytes);

  // How long the first reader of a value waits for a copy that the op `load` starts and that takes so long.
  double wait_us(int value, int load, double copy_us) const;

  bool is_made_by_another(int value, int op) const { return maker_[value] != op; }

  const int num_segments;
  std::vector<Segment> segments;
  std::vector<int32_t> ran_in;  // per op: the segment in which it runs, -1 if it does not
  int64_t idle_bytes = 0;       // of crossing values that no kernel of this pass touches and that die

 private:
  struct Grouped {  // of a value
    int32_t base = 0, made_in = -1;                   // (external kernels on the way) * num_spaces; the nest that makes it
    int32_t outside = 0, elsewhere = 0, readers = 0;  // external kernels that read it, loop ops of other nests, all loop ops
    int32_t noted_at = 0, flags = 0;                  // what the three said before a segment was grouped again, and the stamp of when
  };
  struct Folded {  // of a value
    Span sources;
    int32_t last_segment = -1;                                  // that touches it
    int32_t last = 0, first = 0, second = -1;                   // kernels of the segment that is being worked on
    int32_t loaded_by = -1, loaded_at = 0;                      // nest, and the stamp of when
    int32_t was_touched_at = 0, touched_at = 0, merged_at = 0;  // stamps
  };

  Grouped& note_flags(int value);
  static int32_t flags_of(const Grouped& grouped) {
    return (grouped.outside > 0) | (grouped.elsewhere > 0) << 1 | (grouped.readers > 1) << 2;
  }
  bool dies(int value) const;
  bool is_available(int value) const { return is_backward_ && crossing_[value]; }
  bool is_made_elsewhere(int value, int op) const { return is_available(value) || is_made_by_another(value, op); }
  bool is_held(int value) const { return is_backward_ ? graph_.gradient[value] : (crossing_[value] || graph_.output[value]); }
  bool is_again(int op) const { return is_backward_ && forward_->ran_in[op] >= 0; }

  void group(int segment);
  void ungroup(const Segment& segment);
  int first_in_window(int segment) const;

  void make_kernels(int segment);
  double external(int op, Segment& segment);
  double loop(int op, Segment& segment);
  Span merge_sources(int op, Segment& segment);
  bool is_inlined(int op, int value, int num_sources) const;
  void set_sources(int value, Span sources, const Segment& segment);
  bool is_loaded(int value, int nest) const { return folded_[value].loaded_at == loads_stamp_ && folded_[value].loaded_by == nest; }
  void set_loaded(int value, int nest);
  void load(int value, int nest, Segment& segment);

  void touch(int value, int position);
  void add_touch(int value, bool was_there);
  void remove_touch(int value);
  int last_segment_before(int value, int end) const;
  int first_segment_from(int value, int begin) const;
  int64_t idle_bytes_of(int value) const { return graph_.output[value] || graph_.gradient[value] ? 0 : graph_.live[value]; }

  const Graph& graph_;
  const bool is_backward_;
  const std::vector<uint8_t>& crossing_;
  const std::vector<int32_t>& maker_;
  const Pass* forward_ = nullptr;
  const int num_words_;
  const uint8_t all_marks_;  // without fusion there are no groups
  std::vector<uint8_t> marks_;
  std::vector<Grouped> grouped_;
  std::vector<Folded> folded_;
  std::vector<uint64_t> touched_;  // num_words_ per value: a bit for each segment that touches it
  std::vector<int32_t> nest_of_, kind_of_, launched_at_;  // per op
  Nests nests_;
  int now_ = 0;    // the segment that is being worked on
  int warm_ = -1;  // the segment that nests_, or what is loaded, is ready for
  int nodes_ = 0;  // ordered since nests_ was cleared
  int group_stamp_ = 0, touch_stamp_ = 0, merge_stamp_ = 0, loads_stamp_ = 0;
  bool is_whole_ = true;  // nothing is known yet, so that nothing need be compared
  int64_t work_ = 0;
  std::vector<int32_t> noted_, old_arena_, old_launched_;
  std::vector<std::pair<int32_t, int32_t>> old_loads_;
  std::vector<Segment::Touch> old_touches_;
  std::vector<int64_t> died_;
};

}  // namespace dyngran
