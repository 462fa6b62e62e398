// One plan replayed exactly: what crosses to backward, the schedule that follows (the rules of passes/simulate.py), its bytes and time.
#pragma once

#include "pass.h"

namespace dyngran {

// What really crosses of the values that a plan wishes to save.
class Normalizer {
 public:
  explicit Normalizer(const Graph& graph)
      : graph_(graph),
        crossing_(graph.num_values),
        seen_(graph.num_values),
        unserved_(graph.num_values),
        reruns_(graph.num_ops) {}
  const std::vector<uint8_t>& normalize(const uint8_t* wished);

 private:
  bool find_crossing(const uint8_t* wished);

  const Graph& graph_;
  std::vector<uint8_t> crossing_, seen_, unserved_;  // per value; unserved_: no form of it serves all that runs in backward
  std::vector<uint8_t> reruns_;                      // per op
  std::vector<int32_t> stack_, chosen_;
};

// Stands at one plan and moves to others: only segments that a difference reaches are replayed.
class Replay {
 public:
  explicit Replay(const Graph& graph);
  Outcome move_to(const std::vector<uint8_t>& crossing);
  // The next plan is replayed whole, as if it were the first.
  void forget() { has_plan_ = false; }

  const std::vector<uint8_t>& crossing() const { return crossing_; }
  // Op and bytes live per kernel of the plan it stands at.
  void curve(std::vector<int32_t>& ops, std::vector<int64_t>& live_bytes) const;

 private:
  void flip(int value);
  void change_maker(int value);
  void mark_fetch(int load, int marks, int after = -1);
  void begin_again();
  void find_early();
  void schedule_forward(int segment);
  void schedule_backward(int segment);
  void bring(const int32_t* begin, const int32_t* end, int segment);
  bool is_available(int value, int segment) const;
  void leave(Pass& pass, int op, int marks);
  Outcome count_bytes();

  const Graph& graph_;
  std::vector<uint8_t> crossing_;
  std::vector<int32_t> maker_;  // per value, in backward: the op that loads it where a form of it crosses, else its producer
  Pass forward_, backward_;
  std::vector<int32_t> forward_segment_;  // per op, -1 if it needs a tangent
  std::vector<int32_t> forward_starts_;   // per segment, the first of its ops
  std::vector<int32_t> backward_starts_;  // per segment, the place of its first op in Graph.backward_ops
  std::vector<uint8_t> ready_;            // per value: given, crossing, or made from a tangent
  std::vector<int32_t> flipped_, early_, stack_, missing_, old_ops_;
  std::vector<uint8_t> queued_;  // per op
  int64_t saved_bytes_ = 0;
  bool has_plan_ = false;
};

}  // namespace dyngran
