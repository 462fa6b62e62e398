// Search over saved sets: an archive of the plans that no other beats, and threshold accepting that fills it.
#pragma once

#include <map>
#include <memory>

#include "random.h"
#include "replay.h"

namespace dyngran {

struct Entry {
  Outcome outcome;
  std::vector<uint8_t> crossing;
};

class Archive {  // by peak; along it time strictly falls
 public:
  bool add(const Outcome& outcome, const std::vector<uint8_t>& crossing);
  std::map<int64_t, Entry> entries;
};

struct Settings {
  int64_t budget_bytes;       // transient; peaks above it are penalised
  double price_us_per_byte;   // of every byte above the budget
  double saved_us_per_byte;   // of every saved byte, and
  double peak_us_per_byte;    // of every byte of the peak: zero, but for lists of options
  double first_threshold_us;  // by how much worse a plan may be to be accepted, in the beginning; it falls quadratically to zero
  int64_t num_evaluations;
  int64_t max_work;           // op visits of all evaluations together
  uint64_t seed;
};

class Search {
 public:
  Search(const Graph& graph) : graph(graph), normalizer(graph), here_(std::make_unique<Replay>(graph)) {}
  Replay& replay() { return *here_; }
  const Replay& replay() const { return *here_; }
  // Walks from `start` (one byte per value) by moves over `classes` of like values in the graph's order. Every plan on the way is
  // offered to `archive`. Returns how many were evaluated.
  int64_t walk(const uint8_t* start, const Rows& classes, const Settings& settings, const volatile int32_t* stop);

  const Graph& graph;
  Normalizer normalizer;
  Archive archive;
  std::vector<Entry> options;  // 3-dimensional: (saved bytes, peak, time), kept if Settings prices saved or peak bytes

 private:
  void move(const Rows& classes, const Outcome& now, int64_t budget_bytes, bool may_go_far, Random& random);
  void add_option(const Outcome& outcome, const std::vector<uint8_t>& crossing);

  std::unique_ptr<Replay> here_, away_;  // near the plan that a walk stands at, and elsewhere
  std::vector<uint8_t> wished_, tried_, crossing_;
};

}  // namespace dyngran
