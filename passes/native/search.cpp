// Threshold accepting (Dueck and Scheuer 1990) over saved sets: simulated annealing without exponentials, so that every machine walks alike.
#include "search.h"

#include <algorithm>

namespace dyngran {

bool Archive::add(const Outcome& outcome, const std::vector<uint8_t>& crossing) {
  auto after = entries.upper_bound(outcome.peak_bytes);
  if (after != entries.begin() && std::prev(after)->second.outcome.time_us <= outcome.time_us) return false;
  if (after != entries.begin() && std::prev(after)->first == outcome.peak_bytes) --after;
  while (after != entries.end() && after->second.outcome.time_us >= outcome.time_us) after = entries.erase(after);
  entries.emplace_hint(after, outcome.peak_bytes, Entry{outcome, crossing});
  return true;
}

void Search::add_option(const Outcome& outcome) {
  const auto beats = [](const Outcome& a, const Outcome& b) {
    return a.saved_bytes <= b.saved_bytes && a.peak_bytes <= b.peak_bytes && a.time_us <= b.time_us;
  };
  for (const Entry& option : options)
    if (beats(option.outcome, outcome)) return;
  options.erase(std::remove_if(options.begin(), options.end(), [&](const Entry& option) { return beats(outcome, option.outcome); }),
                options.end());
  options.push_back({outcome, scratch.crossing});
}

void Search::move(const Rows& classes, const Outcome& now, int64_t budget_bytes, Random& random) {
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
  } else if (kind < 0.45) {
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
    const int first = random.below(size), how_many = random.below(3);
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
  const auto keep = [&](const Outcome& outcome) {
    if (has_options) {
      add_option(outcome);
    } else {
      archive.add(outcome, scratch.crossing);
    }
  };
  Random random(settings.seed);
  wished_.assign(start, start + graph.num_values);
  Outcome now = evaluate(graph, scratch, wished_.data());
  keep(now);
  crossing_ = scratch.crossing;
  double now_cost = cost(now);
  int64_t num_done = 1, work = now.work;
  const int64_t max_moves = classes.starts.size() < 2 ? 0 : 20 * settings.num_evaluations;  // moves that change nothing cost little, but are not for ever
  for (int64_t moves = 0; num_done < settings.num_evaluations && moves < max_moves && work < settings.max_work && !*stop; ++moves) {
    tried_ = wished_;
    move(classes, now, settings.budget_bytes, random);
    normalize(graph, scratch, tried_.data());
    if (scratch.crossing == crossing_) continue;
    const Outcome next = evaluate_crossing(graph, scratch);
    ++num_done;
    work += next.work;
    keep(next);
    const double left = 1.0 - double(num_done) / double(settings.num_evaluations);
    const double next_cost = cost(next);
    if (next_cost <= now_cost + settings.first_threshold_us * left * left * random.unit()) {
      wished_.swap(tried_);
      crossing_ = scratch.crossing;
      now = next;
      now_cost = next_cost;
    }
  }
  return num_done;
}

}  // namespace dyngran
