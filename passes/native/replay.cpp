// Peak and time of one saved set: forward then backward, folded into kernels by the rules of passes/fuse.py and passes/simulate.py,
// which are the readable truth; tests/test_simulate.py holds both equal.
#include <algorithm>

#include "graph.h"

namespace dyngran {
namespace {

constexpr int kMaxInlineReads = 4, kMaxAccumulatedReads = 8, kMaxNodesApart = 64;  // as in passes/fuse.py
constexpr int kOutside = 1, kElsewhere = 2, kReader = 4;      // read by an external kernel, by another loop nest; one unit per reader

void bring(const Graph& g, Scratch& s, const int32_t* begin, const int32_t* end) {
  s.missing.clear();
  s.stack.clear();
  for (auto p = begin; p != end; ++p)
    if (!s.available[*p]) s.stack.push_back(*p);
  while (!s.stack.empty()) {
    const int op = g.producer[s.stack.back()];
    s.stack.pop_back();
    if (s.queued[op]) continue;
    s.queued[op] = 1;
    s.missing.push_back(op);
    for (auto p = g.reads.begin(op); p != g.reads.end(op); ++p)
      if (!s.available[*p]) s.stack.push_back(*p);
  }
  std::sort(s.missing.begin(), s.missing.end());
  for (const int op : s.missing) {
    s.queued[op] = 0;
    s.backward.push_back(op);
    if (s.ran[op]) s.again[op] = 1;
    for (auto p = g.writes.begin(op); p != g.writes.end(op); ++p) s.available[*p] = 1;
  }
}

void make_schedule(const Graph& g, Scratch& s) {
  s.ran = g.early_ran;
  s.stack.clear();
  s.is_plain = true;
  for (int value = 0; value < g.num_values; ++value)
    if (s.crossing[value]) s.stack.push_back(g.producer[value]);
  while (!s.stack.empty()) {
    const int op = s.stack.back();
    s.stack.pop_back();
    if (s.ran[op]) continue;
    s.ran[op] = 1;
    s.is_plain = false;
    for (auto p = g.reads.begin(op); p != g.reads.end(op); ++p)
      if (g.producer[*p] >= 0) s.stack.push_back(g.producer[*p]);
  }
  if (!s.is_plain) {
    s.forward.clear();
    for (int op = 0; op < g.num_ops; ++op)
      if (s.ran[op]) s.forward.push_back(op);
  }
  for (int value = 0; value < g.num_values; ++value) s.available[value] = g.given[value] | s.crossing[value] | g.late[value];
  std::fill(s.again.begin(), s.again.end(), 0);
  s.backward.clear();
  for (const int op : g.backward_ops) {
    for (auto p = g.needs.begin(op); p != g.needs.end(op); ++p) {
      if (!s.available[*p]) {
        bring(g, s, g.needs.begin(op), g.needs.end(op));
        break;
      }
    }
    s.backward.push_back(op);
  }
  bring(g, s, g.late_wanted.data(), g.late_wanted.data() + g.late_wanted.size());
}

// What an op reads from memory once its operands are inlined, without repetition.
Span merge_sources(const Graph& g, Scratch& s, int op) {
  const auto begin = g.reads.begin(op), end = g.reads.end(op);
  const int32_t start = int32_t(s.arena.size());
  if (end - begin == 1) {
    const Span only = s.source[*begin];
    if (only.start >= 0) return only;
    s.arena.push_back(*begin);
    return {start, 1};
  }
  const int stamp = ++s.stamp;
  const auto add = [&](int value) {
    if (s.mark[value] != stamp) {
      s.mark[value] = stamp;
      s.arena.push_back(value);
    }
  };
  for (auto p = begin; p != end; ++p) {
    const Span span = s.source[*p];
    if (span.start < 0) {
      add(*p);
    } else {
      for (int i = 0; i < span.length; ++i) add(s.arena[span.start + i]);
    }
  }
  return {start, int32_t(s.arena.size()) - start};
}

template <class Held, class Available>
class Side {
 public:
  Side(const Graph& g, Scratch& s, bool is_backward, Held held, Available available)
      : g_(g), s_(s), is_backward_(is_backward), held_(held), available_(available) {}

  // Appends the kernels of one schedule, folded.
  void fold(const std::vector<int32_t>& schedule, const int32_t* state, const int32_t* nest_of, double& time_us, double& recompute_us) {
    for (int value = 0; value < g_.num_values; ++value) s_.source[value] = {-1, 1};  // alone
    std::fill(s_.loaded.begin(), s_.loaded.end(), -1);
    ++s_.epoch;
    for (const int op : schedule) {
      const bool again = is_backward_ && s_.again[op];
      const double cost = g_.fused && g_.fusible[op] ? loop(op, state, nest_of) : external(op);
      if (cost < 0) continue;  // no kernel of its own
      time_us += cost;
      if (again) recompute_us += cost;
      s_.extra.push_back(again ? g_.rerun_workspace[op] : g_.workspace[op]);
      s_.kernel_ops.push_back(op);
    }
  }

 private:
  double external(int op) {
    const int position = int(s_.change.size());
    int64_t born = 0;
    for (auto p = g_.writes.begin(op); p != g_.writes.end(op); ++p) {
      if (available_(*p)) {  // a sibling result: the saved copy is the one that is read
        if (!g_.fused) {
          born += g_.live[*p];
          s_.deaths.push_back({position, g_.live[*p]});
        }
        continue;
      }
      born += g_.live[*p];
      s_.written.push_back(*p);
      s_.last[*p] = position;
    }
    for (auto p = g_.reads.begin(op); p != g_.reads.end(op); ++p) s_.last[*p] = position;
    s_.change.push_back(born);
    return g_.cost[op];
  }

  bool is_inlined(int op, int value, int num_sources, int flags) const {
    if (held_(value) || (flags & kOutside)) return false;
    if (!(flags & kElsewhere)) return true;
    return !g_.reduction[op] && num_sources <= (flags >= 2 * kReader ? kMaxInlineReads : kMaxAccumulatedReads);
  }

  double loop(int op, const int32_t* state, const int32_t* nest_of) {
    const int position = int(s_.change.size());
    const Span sources = merge_sources(g_, s_, op);
    int64_t born = 0, num_bytes = 0;
    bool is_kernel = false;
    for (auto p = g_.writes.begin(op); p != g_.writes.end(op); ++p) {
      const int value = *p;
      if (available_(value)) continue;
      if (is_inlined(op, value, sources.length, state[value])) {
        s_.source[value] = sources;
        continue;
      }
      is_kernel = true;
      born += g_.live[value];
      num_bytes += g_.full[value];
      s_.written.push_back(value);
      s_.last[value] = position;
      if (g_.live[value] && !g_.reduction[op]) s_.in_place.push_back({position, sources.start, sources.length, value});
    }
    if (!is_kernel) return -1;
    const int nest = nest_of[op];
    for (int i = 0; i < sources.length; ++i) {
      const int value = s_.arena[sources.start + i];
      s_.last[value] = position;
      if (s_.loaded[value] != nest) {
        s_.loaded[value] = nest;
        num_bytes += g_.full[value];
      }
    }
    for (auto p = g_.writes.begin(op); p != g_.writes.end(op); ++p)
      if (!available_(*p) && s_.last[*p] == position) s_.loaded[*p] = nest;
    s_.change.push_back(born);
    const bool is_first = s_.launched[nest] != s_.epoch;
    s_.launched[nest] = s_.epoch;
    return double(num_bytes) / g_.bytes_per_us + (is_first ? g_.launch_us : 0.0);
  }

  const Graph& g_;
  Scratch& s_;
  const bool is_backward_;
  Held held_;
  Available available_;
};

template <class Held, class Available>
Side<Held, Available> side(const Graph& g, Scratch& s, bool is_backward, Held held, Available available) {
  return {g, s, is_backward, held, available};
}

// Bytes that a loop nest writes over an operand that dies in it instead of allocating.
template <class Staying>
void reuse_operands(const Graph& g, Scratch& s, Staying staying) {
  const int stamp = ++s.stamp;
  for (const InPlace& item : s.in_place) {
    for (int i = 0; i < item.length; ++i) {
      const int source = s.arena[item.start + i];
      if (s.last[source] == item.position && g.live[source] == g.live[item.value] && !staying(source) && s.mark[source] != stamp) {
        s.mark[source] = stamp;
        s.extra[item.position] -= g.live[item.value];
        break;
      }
    }
  }
}

}  // namespace

void normalize(const Graph& g, Scratch& s, const uint8_t* wished) {
  std::fill(s.crossing.begin(), s.crossing.end(), 0);
  std::fill(s.seen.begin(), s.seen.end(), 0);
  s.stack.assign(g.wanted.begin(), g.wanted.end());
  while (!s.stack.empty()) {
    const int value = s.stack.back();
    s.stack.pop_back();
    if (s.seen[value] || g.given[value]) continue;
    s.seen[value] = 1;
    const int op = g.producer[value];
    if (g.pinned[op] || ((wished[value] || g.small[value]) && !g.dropped[value] && !g.never_saved[op])) {
      s.crossing[value] = 1;
    } else {
      s.stack.insert(s.stack.end(), g.reads.begin(op), g.reads.end(op));
    }
  }
}

Scratch::Scratch(const Graph& graph) : nests(graph.num_ops) {
  for (auto* per_value : {&crossing, &seen, &available}) per_value->assign(graph.num_values, 0);
  for (auto* per_op : {&ran, &again, &queued}) per_op->assign(graph.num_ops, 0);
  for (auto* per_value : {&state, &made_in, &base, &last, &mark, &loaded}) per_value->assign(graph.num_values, 0);
  for (auto* per_op : {&nest_of, &launched}) per_op->assign(graph.num_ops, 0);
  source.assign(graph.num_values, {-1, 1});
}

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

int Nests::find(int kind, int op, int num_nodes) {
  const size_t mask = slots_.size() - 1;
  for (size_t at = size_t(kind) & mask;; at = (at + 1) & mask) {  // kinds that follow one another lie side by side
    Slot& slot = slots_[at];
    if (slot.epoch == epoch_ && slot.kind != kind) continue;
    if (slot.epoch != epoch_ || num_nodes - slot.began > kMaxNodesApart) slot = {kind, epoch_, op, num_nodes};
    return slot.nest;
  }
}

void find_groups(const Graph& g, const std::vector<int32_t>& schedule, std::vector<int32_t>& made_in, std::vector<int32_t>& base,
                 std::vector<int32_t>& state, std::vector<int32_t>& nest_of, Nests& nests) {
  int num_nodes = 0;
  nests.clear();
  std::fill(state.begin(), state.end(), 0);
  std::fill(made_in.begin(), made_in.end(), -1);
  std::fill(base.begin(), base.end(), 0);
  for (const int op : schedule) {
    int depth = 0;
    for (auto p = g.reads.begin(op); p != g.reads.end(op); ++p) depth = std::max(depth, base[*p]);
    const int nest = nest_of[op] = nests.find(depth + g.space[op], op, num_nodes);
    num_nodes += g.node_count[op];
    const bool fusible = g.fusible[op];
    for (auto p = g.reads.begin(op); p != g.reads.end(op); ++p) {
      if (!fusible) {
        state[*p] |= kOutside;
      } else {
        state[*p] += kReader;
        if (made_in[*p] != nest) state[*p] |= kElsewhere;
      }
    }
    for (auto p = g.writes.begin(op); p != g.writes.end(op); ++p) {
      made_in[*p] = nest;
      base[*p] = fusible ? depth : depth + g.num_spaces;
    }
  }
}

Outcome evaluate(const Graph& g, Scratch& s, const uint8_t* wished) {
  normalize(g, s, wished);
  return evaluate_crossing(g, s);
}

Outcome evaluate_crossing(const Graph& g, Scratch& s) {
  make_schedule(g, s);
  s.change.clear();
  s.extra.clear();
  s.kernel_ops.clear();
  s.deaths.clear();
  s.arena.clear();
  s.written.clear();
  s.in_place.clear();
  std::fill(s.last.begin(), s.last.end(), -1);
  Outcome outcome{};

  const auto stays = [&](int value) { return s.crossing[value] || g.output[value]; };
  const auto& forward = s.is_plain ? g.forward_ops : s.forward;
  const int32_t *state = g.forward_state.data(), *nest_of = g.forward_nests.data();
  if (g.fused && !s.is_plain) {
    find_groups(g, forward, s.made_in, s.base, s.state, s.nest_of, s.nests);
    state = s.state.data();
    nest_of = s.nest_of.data();
  }
  double forward_us = 0, backward_us = 0;
  side(g, s, false, stays, [](int) { return false; }).fold(forward, state, nest_of, forward_us, outcome.recompute_us);
  const int num_forward = int(s.change.size());
  for (const int value : s.written)
    if (!stays(value)) s.deaths.push_back({s.last[value], g.live[value]});
  reuse_operands(g, s, stays);

  s.in_place.clear();
  s.written.clear();
  for (int value = 0; value < g.num_values; ++value)
    if (s.crossing[value]) s.last[value] = num_forward;
  if (g.fused) find_groups(g, s.backward, s.made_in, s.base, s.state, s.nest_of, s.nests);
  side(g, s, true, [&](int value) { return g.gradient[value]; }, [&](int value) { return s.crossing[value]; })
      .fold(s.backward, s.state.data(), s.nest_of.data(), backward_us, outcome.recompute_us);
  const int num_kernels = int(s.change.size());
  for (const int value : s.written)
    if (!g.gradient[value]) s.deaths.push_back({s.last[value], g.live[value]});
  if (num_kernels > num_forward) {
    s.change[num_forward] += g.tangent_bytes;
    for (int value = 0; value < g.num_values; ++value)
      if (s.crossing[value] && !g.output[value] && !g.gradient[value]) s.deaths.push_back({s.last[value], g.live[value]});
  }
  reuse_operands(g, s, [&](int value) { return g.gradient[value] || (s.crossing[value] && g.output[value]) || g.tangent[value]; });

  s.change.push_back(0);
  for (const auto& death : s.deaths) s.change[death.first + 1] -= death.second;
  int64_t live = 0;
  for (int position = 0; position < num_kernels; ++position) {
    live += s.change[position];
    const int64_t now = live + s.extra[position];
    int64_t& side_peak = position < num_forward ? outcome.forward_peak_bytes : outcome.backward_peak_bytes;
    side_peak = std::max(side_peak, now);
    if (now > outcome.peak_bytes) {
      outcome.peak_bytes = now;
      outcome.peak_position = position;
    }
  }
  outcome.time_us = forward_us + backward_us;
  outcome.work = int64_t(forward.size() + s.backward.size() + s.arena.size());
  outcome.num_kernels = num_kernels;
  outcome.num_forward = num_forward;
  for (int value = 0; value < g.num_values; ++value)
    if (s.crossing[value]) outcome.saved_bytes += g.live[value];
  for (const uint8_t again : s.again) outcome.num_recomputed += again;
  return outcome;
}

}  // namespace dyngran
