#include "pass.h"

#include <algorithm>
#include <numeric>

namespace dyngran {

Pass::Pass(const Graph& graph, bool is_backward, int num_segments, const std::vector<uint8_t>& crossing,
           const std::vector<int32_t>& maker)
    : num_segments(num_segments),
      segments(num_segments),
      ran_in(graph.num_ops, -1),
      graph_(graph),
      is_backward_(is_backward),
      crossing_(crossing),
      maker_(maker),
      num_words_((num_segments + 63) / 64),
      all_marks_(graph.fused ? kSchedule | kGroups | kKernels | kBytes : kSchedule | kKernels | kBytes),
      marks_(num_segments),
      grouped_(graph.num_values),
      folded_(graph.num_values),
      touched_(size_t(graph.num_values) * num_words_),
      nest_of_(graph.num_ops, -1),
      kind_of_(graph.num_ops),
      launched_at_(graph.num_ops),
      nests_(graph.num_ops) {}

void Pass::mark_readers(int value, int marks, int after) {
  for (auto reader = graph_.readers.begin(value); reader != graph_.readers.end(value); ++reader)
    if (ran_in[*reader] > after) mark(ran_in[*reader], marks);
}

void Pass::forget(int value) {
  grouped_[value].base = 0;
  grouped_[value].made_in = -1;
  folded_[value].sources = {};
}

void Pass::mark_bytes_of(int value) {
  const uint64_t* words = &touched_[size_t(value) * num_words_];
  for (int word = 0; word < num_words_; ++word)
    for (uint64_t bits = words[word]; bits; bits &= bits - 1) mark(word * 64 + __builtin_ctzll(bits), kBytes);
}

void Pass::change_crossing(int value) {
  if (folded_[value].last_segment < 0) idle_bytes += crossing_[value] ? idle_bytes_of(value) : -idle_bytes_of(value);
}

void Pass::forget_all() {
  is_whole_ = true;
  std::fill(grouped_.begin(), grouped_.end(), Grouped{});
  std::fill(folded_.begin(), folded_.end(), Folded{});
  std::fill(touched_.begin(), touched_.end(), 0);
  std::fill(launched_at_.begin(), launched_at_.end(), 0);
  group_stamp_ = touch_stamp_ = merge_stamp_ = loads_stamp_ = 0;
  std::fill(marks_.begin(), marks_.end(), all_marks_);
  idle_bytes = 0;
  for (int value = 0; value < graph_.num_values; ++value)
    if (is_available(value)) idle_bytes += idle_bytes_of(value);
}

int64_t Pass::fold(const Pass* forward) {
  forward_ = forward;
  work_ = 0;
  warm_ = -1;
  for (int segment = 0; segment < num_segments; ++segment)
    if (is_marked(segment, kGroups)) group(segment);
  warm_ = -1;
  for (int segment = 0; segment < num_segments; ++segment)
    if (is_marked(segment, kKernels)) make_kernels(segment);
  is_whole_ = false;
  return work_;
}

// The segment from which on ops may belong to a nest that is open when `segment` begins.
int Pass::first_in_window(int segment) const {
  int num_nodes = 0;
  while (segment > 0 && num_nodes <= kMaxNodesApart) num_nodes += segments[--segment].num_nodes;
  return segment;
}

void Pass::make_kernels(int number) {
  Segment& segment = segments[number];
  unmark(number, kKernels);
  now_ = number;
  ++touch_stamp_;
  if (is_whole_) segment.touches.clear();
  for (const auto& touch : segment.touches) {
    folded_[touch.value].was_touched_at = touch_stamp_;
    remove_touch(touch.value);
  }
  old_touches_.swap(segment.touches);
  old_arena_.swap(segment.arena);
  old_loads_.swap(segment.loads);
  old_launched_.swap(segment.launched);
  segment.touches.clear();
  segment.arena.clear();
  segment.loads.clear();
  segment.launched.clear();
  segment.kernel_ops.clear();
  segment.kernel_us.clear();
  segment.born.clear();
  segment.extra.clear();
  segment.in_place.clear();
  segment.time_us = segment.recompute_us = 0.0;
  segment.num_again = 0;
  if (graph_.fused && warm_ != number) {
    ++loads_stamp_;
    for (int before = first_in_window(number); before < number; ++before) {
      for (const auto& load : segments[before].loads) set_loaded(load.first, load.second);
      for (const int nest : segments[before].launched) launched_at_[nest] = loads_stamp_;
    }
  }
  warm_ = number + 1;
  noted_.clear();
  for (const int op : segment.ops) {
    const bool again = is_again(op);
    segment.num_again += again;
    const double cost = graph_.fused && graph_.fusible[op] ? loop(op, segment) : external(op, segment);
    if (cost < 0) continue;  // no kernel of its own
    segment.time_us += cost;
    if (again) segment.recompute_us += cost;
    segment.extra.back() += again ? graph_.rerun_workspace[op] : graph_.workspace[op];
    segment.kernel_ops.push_back(op);
    segment.kernel_us.push_back(cost);
  }
  work_ += int64_t(segment.ops.size() + segment.arena.size());
  for (const int value : noted_) {
    const Folded& folded = folded_[value];
    segment.touches.push_back({value, folded.last, folded.first, folded.second});
    add_touch(value, is_whole_ || folded_[value].was_touched_at == touch_stamp_);
  }
  for (const auto& touch : old_touches_) {
    if (folded_[touch.value].touched_at == touch_stamp_) continue;
    if (folded_[touch.value].last_segment < number) mark(folded_[touch.value].last_segment, kBytes);
  }
  mark(number, kBytes);
  if (is_whole_ || (old_loads_ == segment.loads && old_launched_ == segment.launched)) return;
  int num_nodes = 0;
  for (int after = number + 1; after < num_segments && num_nodes <= kMaxNodesApart; ++after) {
    if (segments[after].continues) mark(after, kKernels);
    num_nodes += segments[after].num_nodes;
  }
}

double Pass::external(int op, Segment& segment) {
  const int position = int(segment.born.size());
  int64_t born = 0, copied = 0;
  for (auto p = graph_.writes.begin(op); p != graph_.writes.end(op); ++p) {
    if (is_made_elsewhere(*p, op)) {  // a sibling result: the saved or loaded copy is the one that is read
      if (!graph_.fused) copied += graph_.live[*p];
      continue;
    }
    born += graph_.live[*p];
    touch(*p, position);
  }
  for (auto p = graph_.reads.begin(op); p != graph_.reads.end(op); ++p) touch(*p, position);
  segment.born.push_back(born);
  segment.extra.push_back(copied);
  return graph_.cost[op];
}

double Pass::loop(int op, Segment& segment) {
  const int position = int(segment.born.size());
  const Span sources = merge_sources(op, segment);
  int64_t born = 0, num_bytes = 0;
  bool is_kernel = false;
  for (auto p = graph_.writes.begin(op); p != graph_.writes.end(op); ++p) {
    const int value = *p;
    if (is_made_elsewhere(value, op)) continue;
    if (is_inlined(op, value, sources.length)) {
      set_sources(value, sources, segment);
      continue;
    }
    is_kernel = true;
    set_sources(value, {}, segment);
    born += graph_.live[value];
    num_bytes += graph_.full[value];
    touch(value, position);
    if (graph_.live[value] && !graph_.reduction[op]) segment.in_place.push_back({position, sources.start, sources.length, value});
  }
  if (!is_kernel) return -1;
  const int nest = nest_of_[op];
  for (int i = 0; i < sources.length; ++i) {
    const int value = segment.arena[sources.start + i];
    touch(value, position);
    if (!is_loaded(value, nest)) {
      load(value, nest, segment);
      num_bytes += graph_.full[value];
    }
  }
  for (auto p = graph_.writes.begin(op); p != graph_.writes.end(op); ++p)
    if (!is_made_elsewhere(*p, op) && folded_[*p].sources.start < 0) load(*p, nest, segment);
  segment.born.push_back(born);
  segment.extra.push_back(0);
  const bool is_first = launched_at_[nest] != loads_stamp_;
  if (is_first) segment.launched.push_back(nest);
  launched_at_[nest] = loads_stamp_;
  return double(num_bytes) / graph_.bytes_per_us + (is_first ? graph_.launch_us : 0.0);
}

// What an op reads from memory once its operands are inlined, without repetition.
Span Pass::merge_sources(int op, Segment& segment) {
  const auto begin = graph_.reads.begin(op), end = graph_.reads.end(op);
  const int32_t start = int32_t(segment.arena.size());
  if (end - begin == 1) {
    const Span only = folded_[*begin].sources;
    if (only.start >= 0 && ran_in[maker_[*begin]] == now_) return only;
  }
  const int stamp = ++merge_stamp_;
  const auto add = [&](int value) {
    if (folded_[value].merged_at == stamp) return;
    folded_[value].merged_at = stamp;
    segment.arena.push_back(value);
  };
  for (auto p = begin; p != end; ++p) {
    const Span span = folded_[*p].sources;
    if (span.start < 0) {
      add(*p);
    } else {
      const int made_in = ran_in[maker_[*p]];
      for (int i = 0; i < span.length; ++i) add(segments[made_in].arena[span.start + i]);
    }
  }
  return {start, int32_t(segment.arena.size()) - start};
}

bool Pass::is_inlined(int op, int value, int num_sources) const {
  const Grouped& grouped = grouped_[value];
  if (is_held(value) || grouped.outside) return false;
  if (!grouped.elsewhere) return true;
  return !graph_.reduction[op] && num_sources <= (grouped.readers > 1 ? kMaxInlineReads : kMaxAccumulatedReads);
}

void Pass::set_sources(int value, Span sources, const Segment& segment) {
  const Span before = folded_[value].sources;
  folded_[value].sources = sources;
  if (is_whole_) return;
  const bool is_same = before.start < 0 || sources.start < 0
                           ? (before.start < 0) == (sources.start < 0)
                           : before.length == sources.length &&
                                 std::equal(segment.arena.begin() + sources.start, segment.arena.begin() + sources.start + sources.length,
                                            old_arena_.begin() + before.start);
  if (!is_same) mark_readers(value, kKernels, now_);
}

void Pass::set_loaded(int value, int nest) {
  folded_[value].loaded_at = loads_stamp_;
  folded_[value].loaded_by = nest;
}

void Pass::load(int value, int nest, Segment& segment) {
  set_loaded(value, nest);
  segment.loads.push_back({value, nest});
}

void Pass::touch(int value, int position) {
  if (graph_.given[value]) return;
  Folded& folded = folded_[value];
  if (folded.touched_at != touch_stamp_) {
    folded.touched_at = touch_stamp_;
    noted_.push_back(value);
    folded.first = position;
    folded.second = -1;
  } else if (folded.second < 0 && position != folded.first) {
    folded.second = position;
  }
  folded.last = position;
}

void Pass::remove_touch(int value) {
  touched_[size_t(value) * num_words_ + now_ / 64] &= ~(uint64_t(1) << (now_ % 64));
  int32_t& last = folded_[value].last_segment;
  if (last != now_) return;
  last = last_segment_before(value, now_);
  if (last < 0 && is_available(value)) idle_bytes += idle_bytes_of(value);
}

// `was_there`: before this segment was folded again, so that nothing changes for other segments.
void Pass::add_touch(int value, bool was_there) {
  touched_[size_t(value) * num_words_ + now_ / 64] |= uint64_t(1) << (now_ % 64);
  int32_t& last = folded_[value].last_segment;
  if (last >= now_) return;
  if (last < 0 && is_available(value)) idle_bytes -= idle_bytes_of(value);
  if (last >= 0 && !was_there) mark(last, kBytes);
  last = now_;
}

// The last segment before `end` that touches a value, -1 if none does.
int Pass::last_segment_before(int value, int end) const {
  if (end <= 0) return -1;
  const uint64_t* words = &touched_[size_t(value) * num_words_];
  int word = (end - 1) / 64;
  uint64_t bits = words[word] & (~uint64_t(0) >> (63 - (end - 1) % 64));
  while (!bits && word > 0) bits = words[--word];
  return bits ? word * 64 + 63 - __builtin_clzll(bits) : -1;
}

// The first segment from `begin` on that touches a value, -1 if none does.
int Pass::first_segment_from(int value, int begin) const {
  if (begin >= num_segments) return -1;
  const uint64_t* words = &touched_[size_t(value) * num_words_];
  int word = begin / 64;
  uint64_t bits = words[word] & (~uint64_t(0) << (begin % 64));
  while (!bits && word + 1 < num_words_) bits = words[++word];
  return bits ? word * 64 + __builtin_ctzll(bits) : -1;
}

double Pass::wait_us(int value, int load, double copy_us) const {
  int number = ran_in[load];
  if (number < 0) return 0;
  const Segment* segment = &segments[number];
  const auto kernel = std::find(segment->kernel_ops.begin(), segment->kernel_ops.end(), load);
  if (kernel == segment->kernel_ops.end()) return 0;
  const auto touch_in = [&](const Segment& one) {
    return std::find_if(one.touches.begin(), one.touches.end(), [&](const Segment::Touch& touch) { return touch.value == value; });
  };
  const int begin = int(kernel - segment->kernel_ops.begin()) + 1;
  const int second = touch_in(*segment)->second;
  const auto time = [](const Segment& one, int from, int to) {
    return std::accumulate(one.kernel_us.begin() + from, one.kernel_us.begin() + to, 0.0);
  };
  if (second >= 0) return std::max(0.0, copy_us - time(*segment, begin, second));
  const int reader = first_segment_from(value, number + 1);
  if (reader < 0) return 0;
  double passed = time(*segment, begin, int(segment->kernel_us.size()));
  while (++number < reader && passed < copy_us) passed += segments[number].time_us;
  segment = &segments[reader];
  return std::max(0.0, copy_us - passed - time(*segment, 0, touch_in(*segment)->first));
}

bool Pass::dies(int value) const {
  if (is_held(value)) return false;
  if (is_available(value)) return !graph_.output[value];
  return maker_[value] >= 0 && ran_in[maker_[value]] >= 0;
}

void Pass::count_bytes(int number, int64_t idle) {
  Segment& segment = segments[number];
  unmark(number, kBytes);
  segment.idle_bytes = idle;
  const int num_kernels = int(segment.born.size());
  segment.live = segment.extra;
  died_.assign(num_kernels + 1, 0);
  ++touch_stamp_;
  for (const auto& touch : segment.touches) {
    if (folded_[touch.value].last_segment != number || !dies(touch.value)) continue;
    died_[touch.position] += graph_.live[touch.value];
    folded_[touch.value].touched_at = touch_stamp_;  // it dies here, after `last`
    folded_[touch.value].last = touch.position;
  }
  for (const auto& item : segment.in_place) {  // a loop nest writes over an operand that dies in it instead of allocating
    for (int i = 0; i < item.length; ++i) {
      Folded& source = folded_[segment.arena[item.start + i]];
      if (source.touched_at == touch_stamp_ && source.last == item.position &&
          graph_.live[segment.arena[item.start + i]] == graph_.live[item.value]) {
        source.touched_at = 0;
        segment.live[item.position] -= graph_.live[item.value];
        break;
      }
    }
  }
  if (num_kernels) died_[0] += idle;
  int64_t held = 0;
  segment.peak_bytes = 0;
  segment.peak_position = -1;
  for (int position = 0; position < num_kernels; ++position) {
    held += segment.born[position];
    segment.live[position] += held;
    if (segment.peak_position < 0 || segment.live[position] > segment.peak_bytes) {
      segment.peak_bytes = segment.live[position];
      segment.peak_position = position;
    }
    held -= died_[position];
  }
  segment.end_bytes = held;
}

}  // namespace dyngran
