#include "replay.h"

#include <algorithm>
#include <cstring>

namespace dyngran {
namespace {

constexpr int kMaxSegments = 256;

int num_early_ops(const Graph& g) { return g.num_ops - int(g.backward_ops.size()); }

int num_segments(const Graph& g, int num_ops) { return std::max(1, std::min(kMaxSegments, num_ops / g.segment_ops)); }

// Evenly over so many segments.
int segment_of(int place, int num_ops, int num_segments) { return int(int64_t(place) * num_segments / num_ops); }

}  // namespace

const std::vector<uint8_t>& Normalizer::normalize(const uint8_t* wished) {
  std::fill(unserved_.begin(), unserved_.end(), 0);
  while (!find_crossing(wished)) {
  }
  return crossing_;
}

// False if a form does not serve all that runs again: then it is known as `unserved_`, and its value is to cross itself.
bool Normalizer::find_crossing(const uint8_t* wished) {
  std::fill(crossing_.begin(), crossing_.end(), 0);
  std::fill(seen_.begin(), seen_.end(), 0);
  std::fill(reruns_.begin(), reruns_.end(), 0);
  chosen_.clear();
  stack_.assign(graph_.wanted.begin(), graph_.wanted.end());
  while (!stack_.empty()) {
    const int value = stack_.back();
    stack_.pop_back();
    if (seen_[value] || graph_.given[value]) continue;
    seen_[value] = 1;
    const int op = graph_.producer[value];
    const bool is_wished = (wished[value] || graph_.small[value]) && !graph_.dropped[value] && !graph_.never_saved[op];
    if (is_wished || unserved_[value]) {
      crossing_[value] = 1;
      continue;
    }
    const auto form = std::find_if(graph_.forms.begin(value), graph_.forms.end(value), [&](int stored) { return wished[stored]; });
    if (form != graph_.forms.end(value)) {
      crossing_[*form] = 1;
      chosen_.push_back(*form);
      const int load = graph_.loader[*form];
      for (auto read = graph_.reads.begin(load); read != graph_.reads.end(load); ++read)
        if (*read != *form) stack_.push_back(*read);
      for (auto again = graph_.again.begin(*form); again != graph_.again.end(*form); ++again) reruns_[*again] = 1;
    } else if (graph_.pinned[op]) {
      crossing_[value] = 1;
    } else {
      reruns_[op] = 1;
      stack_.insert(stack_.end(), graph_.reads.begin(op), graph_.reads.end(op));
    }
  }
  bool is_served = true;
  for (const int form : chosen_) {
    if (std::none_of(graph_.barred.begin(form), graph_.barred.end(form), [&](int op) { return reruns_[op]; })) continue;
    unserved_[graph_.form_of[form]] = 1;
    is_served = false;
  }
  return is_served;
}

Replay::Replay(const Graph& graph)
    : graph_(graph),
      crossing_(graph.num_values),
      maker_(graph.producer),
      forward_(graph, false, num_segments(graph, num_early_ops(graph)), crossing_, graph.producer),
      backward_(graph, true, num_segments(graph, int(graph.backward_ops.size())), crossing_, maker_),
      forward_segment_(graph.num_ops, -1),
      queued_(graph.num_ops) {
  std::vector<uint8_t> is_late(graph.num_ops);
  for (const int op : graph.backward_ops) is_late[op] = 1;
  int place = 0;
  for (int op = 0; op < graph.num_ops; ++op) {
    if (is_late[op]) continue;
    forward_segment_[op] = segment_of(place++, num_early_ops(graph), forward_.num_segments);
    if (forward_segment_[op] == int(forward_starts_.size())) forward_starts_.push_back(op);
    if (graph.early_ran[op]) forward_.ran_in[op] = forward_segment_[op];
  }
  forward_starts_.resize(forward_.num_segments + 1, graph.num_ops);
  for (int value = 0; value < graph.num_values; ++value) ready_.push_back(graph.given[value] | graph.late[value]);
  const int num_late = int(graph.backward_ops.size());
  backward_starts_.assign(backward_.num_segments + 1, num_late);
  for (int at = num_late; at-- > 0;) {
    const int segment = segment_of(at, num_late, backward_.num_segments);
    backward_.ran_in[graph.backward_ops[at]] = segment;
    backward_starts_[segment] = at;
  }
  backward_starts_[0] = 0;
}

Outcome Replay::move_to(const std::vector<uint8_t>& crossing) {
  flipped_.clear();
  const int num_values = graph_.num_values;
  for (int value = 0; value < num_values;) {
    if (value + 8 <= num_values && std::memcmp(&crossing[value], &crossing_[value], 8) == 0) {
      value += 8;
      continue;
    }
    const int end = std::min(value + 8, num_values);
    for (; value < end; ++value)
      if (crossing[value] != crossing_[value]) flipped_.push_back(value);
  }
  bool is_early_known = has_plan_;
  for (const int value : flipped_) {
    flip(value);
    is_early_known &= graph_.early_ran[graph_.producer[value]] != 0;
  }
  if (!is_early_known) find_early();
  const int num_marked = forward_.num_marked() + backward_.num_marked();
  if (!has_plan_ || 2 * num_marked > forward_.num_segments + backward_.num_segments) begin_again();
  for (int segment = 0; segment < forward_.num_segments; ++segment)
    if (forward_.is_marked(segment, Pass::kSchedule)) schedule_forward(segment);
  for (int segment = 0; segment < backward_.num_segments; ++segment)
    if (backward_.is_marked(segment, Pass::kSchedule)) schedule_backward(segment);
  const int64_t work = forward_.fold(nullptr) + backward_.fold(&forward_);
  for (const int value : flipped_) {
    forward_.mark_bytes_of(value);
    backward_.mark_bytes_of(value);
  }
  Outcome outcome = count_bytes();
  outcome.work = work;
  return outcome;
}

void Replay::begin_again() {
  has_plan_ = true;
  flipped_.clear();
  forward_.forget_all();
  backward_.forget_all();
  for (Segment& segment : backward_.segments) {
    for (const int op : segment.ops)
      if (forward_segment_[op] >= 0) backward_.ran_in[op] = -1;
    segment.ops.clear();
  }
}

void Replay::flip(int value) {
  crossing_[value] ^= 1;
  ready_[value] ^= 1;
  saved_bytes_ += crossing_[value] ? graph_.live[value] : -graph_.live[value];
  const int producer = graph_.producer[value];
  if (graph_.form_of[value] >= 0) change_maker(graph_.form_of[value]);
  forward_.mark(forward_.ran_in[producer], Pass::kKernels);
  backward_.mark(backward_.ran_in[producer], Pass::kSchedule | Pass::kGroups | Pass::kKernels);
  backward_.mark_readers(value, Pass::kSchedule | Pass::kGroups | Pass::kKernels);
  if (graph_.gradient[value]) backward_.mark(backward_.num_segments - 1, Pass::kSchedule);  // the caller reads it as well
  backward_.forget(value);
  backward_.change_crossing(value);
}

// A form of `value` has begun or ceased to cross: another op makes it in backward.
void Replay::change_maker(int value) {
  constexpr int kAll = Pass::kSchedule | Pass::kGroups | Pass::kKernels;
  const auto stored =
      std::find_if(graph_.forms.begin(value), graph_.forms.end(value), [&](int stored) { return crossing_[stored]; });
  backward_.mark(backward_.ran_in[maker_[value]], kAll);
  maker_[value] = stored == graph_.forms.end(value) ? graph_.producer[value] : graph_.loader[*stored];
  backward_.mark(backward_.ran_in[maker_[value]], kAll);
  backward_.mark_readers(value, kAll);
  backward_.forget(value);
  for (auto form = graph_.forms.begin(value); form != graph_.forms.end(value); ++form) mark_fetch(graph_.loader[*form], Pass::kSchedule);
}

// The segment in which something is to be fetched has to look again whether it still is, or is needed earlier.
void Replay::mark_fetch(int load, int marks, int after) {
  const int fetch = graph_.fetch[load];
  if (fetch >= 0 && backward_.ran_in[fetch] > after) backward_.mark(backward_.ran_in[fetch], marks);
}

// FREE ops that forward runs because a saved value needs them.
void Replay::find_early() {
  for (const int op : early_) queued_[op] = 2;
  old_ops_.swap(early_);
  early_.clear();
  stack_.clear();
  for (int value = 0; value < graph_.num_values; ++value)
    if (crossing_[value]) stack_.push_back(graph_.producer[value]);
  while (!stack_.empty()) {
    const int op = stack_.back();
    stack_.pop_back();
    if (graph_.early_ran[op] || queued_[op] & 1) continue;
    queued_[op] |= 1;
    early_.push_back(op);
    for (auto p = graph_.reads.begin(op); p != graph_.reads.end(op); ++p)
      if (graph_.producer[*p] >= 0) stack_.push_back(graph_.producer[*p]);
  }
  const auto change = [&](int op) {
    forward_.mark(forward_segment_[op], Pass::kSchedule);
    backward_.mark(backward_.ran_in[op], Pass::kKernels);  // it runs again, or no longer
  };
  for (const int op : early_) {
    if (queued_[op] == 1) {
      change(op);
      forward_.ran_in[op] = forward_segment_[op];
      for (auto write = graph_.writes.begin(op); write != graph_.writes.end(op); ++write) forward_.mark_readers(*write, Pass::kKernels);
    }
  }
  for (const int op : old_ops_) {
    if (queued_[op] == 2) {
      change(op);
      leave(forward_, op, Pass::kGroups | Pass::kKernels);
    }
    queued_[op] = 0;
  }
  for (const int op : early_) queued_[op] = 0;
}

// An op no longer runs where it ran.
void Replay::leave(Pass& pass, int op, int marks) {
  const int segment = pass.ran_in[op];
  pass.ran_in[op] = -1;
  if (&pass == &backward_) mark_fetch(op, marks & Pass::kSchedule, segment);
  for (auto write = graph_.writes.begin(op); write != graph_.writes.end(op); ++write) {
    if (pass.is_made_by_another(*write, op)) continue;
    pass.forget(*write);
    pass.mark_readers(*write, marks, segment);
    if (graph_.gradient[*write]) pass.mark(pass.num_segments - 1, marks);
  }
}

void Replay::schedule_forward(int segment) {
  auto& ops = forward_.segments[segment].ops;
  forward_.unmark(segment, Pass::kSchedule);
  forward_.mark(segment, Pass::kGroups | Pass::kKernels);
  ops.clear();
  for (int op = forward_starts_[segment]; op < forward_starts_[segment + 1]; ++op)
    if (forward_.ran_in[op] == segment) ops.push_back(op);
}

bool Replay::is_available(int value, int segment) const {
  if (ready_[value]) return true;
  const int made_in = backward_.ran_in[maker_[value]];
  return made_in >= 0 && made_in <= segment;
}

void Replay::schedule_backward(int segment) {
  auto& ops = backward_.segments[segment].ops;
  backward_.unmark(segment, Pass::kSchedule);
  old_ops_.swap(ops);
  ops.clear();
  for (const int op : old_ops_)
    if (forward_segment_[op] >= 0 && backward_.ran_in[op] == segment) backward_.ran_in[op] = -1;
  for (int at = backward_starts_[segment]; at < backward_starts_[segment + 1]; ++at) {
    const int op = graph_.backward_ops[at];
    bring(graph_.needs.begin(op), graph_.needs.end(op), segment);
    for (auto stored = graph_.fetched.begin(op); stored != graph_.fetched.end(op); ++stored)
      if (crossing_[*stored]) bring(&graph_.form_of[*stored], &graph_.form_of[*stored] + 1, segment);
    ops.push_back(op);
  }
  if (segment + 1 == backward_.num_segments)
    bring(graph_.late_wanted.data(), graph_.late_wanted.data() + graph_.late_wanted.size(), segment);
  if (ops == old_ops_) return;
  backward_.mark(segment, Pass::kGroups | Pass::kKernels);
  for (const int op : old_ops_) {
    if (backward_.ran_in[op] >= 0) continue;
    backward_.ran_in[op] = segment;
    leave(backward_, op, Pass::kSchedule | Pass::kGroups | Pass::kKernels);
  }
}

// Appends what is missing of the values that an op reads, in the graph's order.
void Replay::bring(const int32_t* begin, const int32_t* end, int segment) {
  stack_.clear();
  for (auto p = begin; p != end; ++p)
    if (!is_available(*p, segment)) stack_.push_back(*p);
  if (stack_.empty()) return;
  missing_.clear();
  while (!stack_.empty()) {
    const int op = maker_[stack_.back()];
    stack_.pop_back();
    if (queued_[op]) continue;
    queued_[op] = 1;
    missing_.push_back(op);
    for (auto p = graph_.reads.begin(op); p != graph_.reads.end(op); ++p)
      if (!is_available(*p, segment)) stack_.push_back(*p);
  }
  std::sort(missing_.begin(), missing_.end());
  auto& ops = backward_.segments[segment].ops;
  for (const int op : missing_) {
    queued_[op] = 0;
    ops.push_back(op);
    if (backward_.ran_in[op] > segment) {  // it was made later
      backward_.mark(backward_.ran_in[op], Pass::kSchedule);
      leave(backward_, op, Pass::kGroups | Pass::kKernels);
    }
    backward_.ran_in[op] = segment;
  }
}

Outcome Replay::count_bytes() {
  Outcome outcome{};
  int64_t live = 0;
  const auto add = [&](Pass& pass, int64_t idle_bytes, int64_t& pass_peak) {
    for (int number = 0; number < pass.num_segments; ++number) {
      Segment& segment = pass.segments[number];
      const int num_kernels = int(segment.kernel_ops.size());
      const int64_t idle = num_kernels ? idle_bytes : 0;
      if (pass.is_marked(number, Pass::kBytes) || segment.idle_bytes != idle) pass.count_bytes(number, idle);
      if (num_kernels) idle_bytes = 0;
      const int64_t peak = num_kernels ? live + segment.peak_bytes : 0;
      pass_peak = std::max(pass_peak, peak);
      if (peak > outcome.peak_bytes) {
        outcome.peak_bytes = peak;
        outcome.peak_position = outcome.num_kernels + segment.peak_position;
      }
      live += segment.end_bytes;
      outcome.num_kernels += num_kernels;
      outcome.num_recomputed += segment.num_again;
      outcome.time_us += segment.time_us;
      outcome.recompute_us += segment.recompute_us;
    }
  };
  add(forward_, 0, outcome.forward_peak_bytes);
  outcome.num_forward = outcome.num_kernels;
  live += graph_.tangent_bytes;
  add(backward_, backward_.idle_bytes, outcome.backward_peak_bytes);
  for (const int stored : graph_.copied)
    if (crossing_[stored]) outcome.time_us += backward_.wait_us(graph_.form_of[stored], graph_.loader[stored], graph_.copy_us[stored]);
  outcome.saved_bytes = saved_bytes_;
  return outcome;
}

void Replay::curve(std::vector<int32_t>& ops, std::vector<int64_t>& live_bytes) const {
  int64_t held = 0;
  for (const Pass* pass : {&forward_, &backward_}) {
    for (const Segment& segment : pass->segments) {
      ops.insert(ops.end(), segment.kernel_ops.begin(), segment.kernel_ops.end());
      for (const int64_t bytes : segment.live) live_bytes.push_back(held + bytes);
      held += segment.end_bytes;
    }
    held += graph_.tangent_bytes;
  }
}

}  // namespace dyngran
