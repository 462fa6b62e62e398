// Threshold accepting (Dueck and Scheuer 1990) over saved sets: simulated annealing without exponentials, so that every machine walks alike.
#include "search.h"

#include <algorithm>

namespace dyngran {
namespace {

constexpr int kNear = 16;  // values that differ: a plan that is further away is replayed apart, so that the way back is short

constexpr int kValuesPerVisit = 32;  // to know what differs, every value is looked at, but not for long

int count_differing(const std::vector<uint8_t>& one, const std::vector<uint8_t>& other) {
  int count = 0;
  for (size_t value = 0; value < one.size(); ++value) count += one[value] != other[value];
  return count;
}

}  // namespace

bool Archive::add(const Outcome& outcome, const std::vector<uint8_t>& crossing) {
  auto after = entries.upper_bound(outcome.peak_bytes);
  if (after != entries.begin() && std::prev(after)->second.outcome.time_us <= outcome.time_us) return false;
  if (after != entries.begin() && std::prev(after)->first == outcome.peak_bytes) --after;
  while (after != entries.end() && after->second.outcome.time_us >= outcome.time_us) after = entries.erase(after);
  entries.emplace_hint(after, outcome.peak_bytes, Entry{outcome, crossing});
  return true;
}

void Search::add_option(const Outcome& outcome, const std::vector<uint8_t>& crossing) {
  const auto beats = [](const Outcome& a, const Outcome& b) {
    return a.saved_bytes <= b.saved_bytes && a.peak_bytes <= b.peak_bytes && a.time_us <= b.time_us;
  };
  for (const Entry& option : options)
    if (beats(option.outcome, outcome)) return;
  options.erase(std::remove_if(options.begin(), options.end(), [&](const Entry& option) { return beats(outcome, option.outcome); }),
                options.end());
  options.push_back({outcome, crossing});
}

void Search::move(const Rows& classes, const Outcome& now, int64_t budget_bytes, bool may_go_far, Random& random) {
  const int num_classes = int(classes.starts.size()) - 1;
  const auto flip = [&](int value) { tried_[value] = !crossing_[value]; };
  const double kind = random.unit();
  const int row = random.below(num_classes), size = classes.size(row);
  const int32_t* values = classes.begin(row);
  if (kind < 0.25) {
    flip(values[random.below(size)]);
  } else if (kind < 0.35) {  // towards the budget: drop one, or save one more
    const bool is_over = now.peak_bytes > budget_bytes;
    for (int attempt = 0; attempt < 8; ++attempt) {
      const int other = random.below(num_classes);
      const int value = classes.begin(other)[random.below(classes.size(other))];
      if (bool(crossing_[value]) == is_over) {
        flip(value);
        break;
      }
    }
  } else if (kind < 0.45 && (may_go_far || size <= kNear)) {
    const uint8_t on = random.below(2);
    for (int i = 0; i < size; ++i) tried_[values[i]] = on;
  } else if (kind < 0.60) {
    const int first = random.below(size), last = std::min(size, first + 1 + random.below(6));
    const uint8_t on = random.below(2);
    for (int i = first; i < last; ++i) tried_[values[i]] = on;
  } else if (kind < 0.75) {  // one for another of about the same place
    const int other = random.below(num_classes), place = random.below(size);
    flip(values[place]);
    flip(classes.begin(other)[std::min(classes.size(other) - 1, int(int64_t(place) * classes.size(other) / size))]);
  } else {  // slide along an edge of the graph: save an operand or a result instead; of one value, of a few of its class, or of all
    const int first = random.below(size), how_many = random.below(may_go_far ? 3 : 2);
    const int begin = how_many == 2 ? 0 : first, end = how_many == 2 ? size : std::min(size, first + 1 + how_many * random.below(6));
    const int edge = int(random.next() >> 40);
    for (int i = begin; i < end; ++i) {
      const int num_edges = graph.neighbours.size(values[i]);
      if (num_edges == 0 || !crossing_[values[i]]) continue;
      tried_[values[i]] = 0;
      tried_[graph.neighbours.begin(values[i])[edge % num_edges]] = 1;
    }
  }
}

int64_t Search::walk(const uint8_t* start, const Rows& classes, const Settings& settings, const volatile int32_t* stop) {
  const bool has_options = settings.saved_us_per_byte > 0 || settings.peak_us_per_byte > 0;
  const auto cost = [&](const Outcome& outcome) {
    const int64_t over = std::max<int64_t>(0, outcome.peak_bytes - settings.budget_bytes);
    return outcome.time_us + double(over) * settings.price_us_per_byte + double(outcome.saved_bytes) * settings.saved_us_per_byte +
           double(outcome.peak_bytes) * settings.peak_us_per_byte;
  };
  const auto keep = [&](const Outcome& outcome, const std::vector<uint8_t>& crossing) {
    if (has_options) {
      add_option(outcome, crossing);
    } else {
      archive.add(outcome, crossing);
    }
  };
  Random random(settings.seed);
  wished_.assign(start, start + graph.num_values);
  crossing_ = normalizer.normalize(start);
  here_->forget();  // so that neither plans nor work depend on what was replayed before
  if (away_) away_->forget();
  Outcome now = here_->move_to(crossing_);
  keep(now, crossing_);
  double now_cost = cost(now);
  int64_t num_done = 1, near_work = now.work, far_work = 0;  // plans far away cost as much as very many near ones: half the work is theirs
  const auto share_done = [&] {
    return std::max(double(num_done) / double(settings.num_evaluations), double(near_work + far_work) / double(settings.max_work));
  };
  const int64_t max_moves = classes.starts.size() < 2 ? 0 : 20 * settings.num_evaluations;  // moves that change nothing cost little, but are not for ever
  for (int64_t moves = 0; moves < max_moves && share_done() < 1.0 && !*stop; ++moves) {
    tried_ = wished_;
    move(classes, now, settings.budget_bytes, far_work <= near_work, random);
    const auto& crossing = normalizer.normalize(tried_.data());
    const int distance = count_differing(crossing, crossing_);
    if (distance == 0) continue;
    const bool is_far = distance > kNear;
    if (is_far && !away_) away_ = std::make_unique<Replay>(graph);
    const Outcome next = (is_far ? away_ : here_)->move_to(crossing);
    ++num_done;
    (is_far ? far_work : near_work) += next.work + graph.num_values / kValuesPerVisit;
    keep(next, crossing);
    const double left = std::max(0.0, 1.0 - share_done());
    const double next_cost = cost(next);
    if (next_cost <= now_cost + settings.first_threshold_us * left * left * random.unit()) {
      if (is_far) here_.swap(away_);
      wished_.swap(tried_);
      crossing_ = crossing;
      now = next;
      now_cost = next_cost;
    }
  }
  return num_done;
}

}  // namespace dyngran
