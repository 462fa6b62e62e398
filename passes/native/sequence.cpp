// Annealing over the order of ops, in which an op may run more than once; passes/solvers/order.py explains the method and its sources,
// passes/schedule.py is the readable truth for what is live when.
//
// A step is a row of slots, most of them empty, forward before backward. Live bytes per slot stand in a segment tree (add to a range,
// maximum), so that running an op once more, or once less, costs O(values of the op * log slots). A move is a few such changes, written
// to a log; a move that is not accepted is undone from it.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "graph.h"
#include "random.h"

using dyngran::Random;
using dyngran::Rows;

namespace {

enum OpFlag : uint8_t { kInForward = 1, kInBackward = 2, kPinned = 4, kWanted = 8 };  // must run in forward; only in backward; once; at all
enum ValueFlag : uint8_t { kOutput = 1, kGradient = 2, kNeverSaved = 4 };             // kNeverSaved: may not cross to backward
enum Mix { kRelocate, kAdvance, kDrop, kErase, kRandomInsert, kNumMoves };

constexpr int kMaxChanges = 16;  // of a drop: what it may run again to make one value
constexpr int kMaxPulled = 12;   // ops that an advance takes along
constexpr int kMaxRepairs = 8, kSamples = 4;  // drops that follow an erasure, and values tried for each
constexpr int kScanSlots = 48;   // how far from the wanted slot an empty one is looked for

double decay(double x) {  // exp(-x) to about 1 %, by multiplications only: the same on every machine
  if (x > 20) return 0;
  double y = 1 - x / 1024;
  for (int i = 0; i < 10; ++i) y *= y;
  return y;
}

class Bytes {  // live bytes per slot; open intervals, so that slot s is leaf s + 1
 public:
  void reset(int num_slots) {
    size_ = 1;
    while (size_ < num_slots + 2) size_ *= 2;
    top_.assign(2 * size_, 0);
    below_.assign(2 * size_, 0);
  }
  void add(int first, int last, int64_t bytes) {
    if (first > last || !bytes) return;
    int l = first + size_, r = last + 2 + size_;
    for (; l ^ r ^ 1; l >>= 1, r >>= 1) {
      if (~l & 1) top_[l ^ 1] += bytes, below_[l ^ 1] += bytes;
      if (r & 1) top_[r ^ 1] += bytes, below_[r ^ 1] += bytes;
      lift(l >> 1);
      lift(r >> 1);
    }
    for (l >>= 1; l; l >>= 1) lift(l);
  }
  int64_t most() const { return top_[1]; }
  int64_t most(int first, int last) const {
    if (first > last) return 0;
    int l = first + size_, r = last + 2 + size_;
    int64_t left = INT64_MIN / 2, right = INT64_MIN / 2;
    for (; l ^ r ^ 1;) {
      if (~l & 1) left = std::max(left, top_[l ^ 1]);
      if (r & 1) right = std::max(right, top_[r ^ 1]);
      l >>= 1, r >>= 1;
      left += below_[l];
      right += below_[r];
    }
    int64_t best = std::max(left, right);
    for (l >>= 1; l; l >>= 1) best += below_[l];
    return best;
  }
  int peak_slot() const {
    int node = 1;
    while (node < size_) node = top_[2 * node] >= top_[2 * node + 1] ? 2 * node : 2 * node + 1;
    return node - size_ - 1;
  }
  int first_above(int from, int64_t bytes) const { return find(1, 0, size_, from + 1, bytes) - 1; }  // -2: none

 private:
  void lift(int node) { top_[node] = std::max(top_[2 * node], top_[2 * node + 1]) + below_[node]; }
  int find(int node, int low, int width, int from, int64_t bytes) const {
    if (low + width <= from || top_[node] <= bytes) return -1;
    if (width == 1) return low;
    bytes -= below_[node];
    const int found = find(2 * node, low, width / 2, from, bytes);
    return found >= 0 ? found : find(2 * node + 1, low + width / 2, width / 2, from, bytes);
  }
  int size_ = 1;
  std::vector<int64_t> top_, below_;  // largest of the subtree, `below_` of itself and its children included; added to the whole subtree
};

struct Change {
  int32_t op, slot;
  bool inserted;
};

class Sequence {
 public:
  int num_values, num_ops;
  Rows reads, writes;
  std::vector<int64_t> size, workspace, rerun;
  std::vector<double> cost;
  std::vector<uint8_t> op_flags, value_flags;
  std::vector<int32_t> producer;
  int64_t tangent_bytes = 0;
  Random random{0};

  std::vector<int32_t> best;  // op per position of the best sequence so far
  int best_forward = 0;
  int64_t best_peak = INT64_MAX;
  double best_cost = 0;
  int64_t budget = 0;  // what the best sequence is judged by

  void load(const int32_t* ops, int num_forward, int num_total) {
    lay_out(std::vector<int32_t>(ops, ops + num_total), num_forward);
    scale_ = double(std::max<int64_t>(tree_.most(), 1));
    forget_best();
  }

  void forget_best() {
    best_peak = INT64_MAX;
    best_cost = 0;
    best.clear();
    remember();
  }

  // Anneals towards a peak of `target` bytes; heat falls from `hot` to `cold`, in shares of the cost of running everything once.
  int64_t run(int64_t target, int num_moves, double hot, double cold, double bytes_weight, const double* mix) {
    target_ = target;
    weight_ = bytes_weight;
    double sum = 0;
    double bounds[kNumMoves];
    for (int i = 0; i < kNumMoves; ++i) bounds[i] = sum += mix[i];
    int64_t accepted = 0;
    double heat = hot;
    for (int move = 0; move < num_moves; ++move) {
      if (move % 256 == 0) heat = hot + (cold - hot) * move / num_moves;
      if (crowded_ > 64 || num_runs_ * 2 > num_slots_ || (moves_ & 0xFFFF) == 0xFFFF) respace();
      ++moves_;
      const double before = objective();
      log_.clear();
      const double pick = random.unit() * sum;
      int kind = 0;
      while (kind + 1 < kNumMoves && pick >= bounds[kind]) ++kind;
      const bool made = kind == kRelocate  ? relocate()
                        : kind == kAdvance ? advance(hot_slot())
                        : kind == kDrop    ? drop_one(hot_slot())
                        : kind == kErase   ? erase_one()
                                           : insert_one();
      if (!made || log_.empty()) {
        undo(0);
        continue;
      }
      const double change = objective() - before;
      if (change > 0 && random.unit() >= decay(change / heat)) {
        undo(0);
        continue;
      }
      ++accepted;
      if (is_better()) remember();
    }
    return accepted;
  }

  // At the peak, drops the values that cost least per byte until the peak fits or nothing more can be dropped.
  bool reach(int64_t target, int max_steps) {
    target_ = target;
    int64_t least = INT64_MAX;
    for (int step = 0, lowered = 0; step < max_steps && step < lowered + 32 && tree_.most() > target_; ++step) {
      if (tree_.most() < least) least = tree_.most(), lowered = step;
      if (crowded_ > 16 || num_runs_ * 2 > num_slots_) respace();
      log_.clear();
      if (!best_drop(tree_.peak_slot(), 24)) {
        if (is_better()) remember();
        return false;
      }
    }
    if (is_better()) remember();
    return tree_.most() <= target_;
  }

  int64_t peak() const { return tree_.most(); }
  double total_cost() const { return cost_; }

  void restart_from_best() { lay_out(std::vector<int32_t>(best), best_forward); }

 private:
  Bytes tree_;
  std::vector<int32_t> at_;                   // op per slot, -1 if empty
  std::vector<std::vector<int32_t>> runs_;    // slots per op, ascending
  std::vector<std::vector<int32_t>> reads_at_;  // slots per value, ascending
  std::vector<int32_t> spare_, place_;     // ops that run more often than they must, and where each stands in that list
  std::vector<Change> log_;
  std::vector<int32_t> sample_, pulled_, todo_;
  int num_slots_ = 0, boundary_ = 0, num_runs_ = 0, crowded_ = 0;
  int64_t moves_ = 0, target_ = 0;
  size_t log_limit_ = 0;
  double cost_ = 0, base_cost_ = 1, weight_ = 1, scale_ = 1;  // bytes over the target weigh weight_ * bytes / scale_

  // ---- the sequence ------------------------------------------------------------------------------------------------------------

  void lay_out(const std::vector<int32_t>& ops, int num_forward) {
    const int num_total = int(ops.size()), num_backward = num_total - num_forward;
    const int forward_slots = num_forward ? 4 * num_forward + 32 : 0, backward_slots = num_backward ? 4 * num_backward + 32 : 0;
    num_slots_ = forward_slots + backward_slots;
    boundary_ = forward_slots;
    tree_.reset(num_slots_);
    at_.assign(num_slots_, -1);
    runs_.assign(num_ops, {});
    reads_at_.assign(num_values, {});
    spare_.clear();
    place_.assign(num_ops, -1);
    num_runs_ = crowded_ = 0;
    cost_ = 0;
    base_cost_ = 0;
    for (const double each : cost) base_cost_ += each;
    if (base_cost_ <= 0) base_cost_ = 1;
    if (num_backward) tree_.add(boundary_, num_slots_ - 1, tangent_bytes);
    for (int i = 0; i < num_total; ++i) {
      const bool late = i >= num_forward;
      const int64_t within = late ? i - num_forward : i, width = late ? backward_slots : forward_slots, count = late ? num_backward : num_forward;
      change(ops[i], (late ? boundary_ : 0) + int((2 * within + 1) * width / (2 * count)), true);
    }
    log_.clear();
  }

  std::vector<int32_t> order(int* num_forward) const {
    std::vector<int32_t> ops;
    *num_forward = 0;
    for (int slot = 0; slot < num_slots_; ++slot) {
      if (slot == boundary_) *num_forward = int(ops.size());
      if (at_[slot] >= 0) ops.push_back(at_[slot]);
    }
    if (boundary_ >= num_slots_) *num_forward = int(ops.size());
    return ops;
  }

  void respace() {
    int num_forward;
    const auto ops = order(&num_forward);
    lay_out(ops, num_forward);
  }

  bool is_better() const {
    const int64_t peak = tree_.most();
    if (peak > budget) return best_peak > budget && (peak < best_peak || (peak == best_peak && cost_ < best_cost));
    const double gain = best_cost - cost_;
    return best_peak > budget || gain > 1e-9 * base_cost_ || (gain >= -1e-9 * base_cost_ && peak < best_peak);
  }

  void remember() {
    best = order(&best_forward);
    best_peak = tree_.most();
    best_cost = cost_;
  }

  double objective() const {
    const int64_t over = tree_.most() - target_;
    return cost_ / base_cost_ + (over > 0 ? weight_ * double(over) / scale_ : 0);
  }

  // Last slot at which the copy made at `made` is live, if the next copy is made at `next` (num_slots_: none).
  int last_of(int value, int made, int next) const {
    if (made >= boundary_ && is_held(value)) return made;
    const uint8_t flags = value_flags[value];
    if ((flags & kGradient && next >= num_slots_) || (flags & kOutput && made < boundary_ && next >= boundary_)) return num_slots_ - 1;
    const auto& at = reads_at_[value];
    const auto found = std::lower_bound(at.begin(), at.end(), next);
    if (found == at.begin() || *(found - 1) < made) return made;
    return *(found - 1);
  }

  static int count_before(const std::vector<int32_t>& slots, int slot) {
    return int(std::lower_bound(slots.begin(), slots.end(), slot) - slots.begin());
  }
  int next_run(int op, int place) const { return place < int(runs_[op].size()) ? runs_[op][place] : num_slots_; }

  // Runs `op` at `slot` once more, or no longer. Nothing is checked here.
  void change(int op, int slot, bool insert) {
    auto& runs = runs_[op];
    const int place = count_before(runs, slot);
    const int before = place ? runs[place - 1] : -1, after = next_run(op, place + (insert ? 0 : 1));
    for (auto w = writes.begin(op); w != writes.end(op); ++w) {
      const int64_t bytes = insert ? size[*w] : -size[*w];
      if (!bytes) continue;
      tree_.add(slot, last_of(*w, slot, after), bytes);
      if (before >= 0) tree_.add(last_of(*w, before, slot) + 1, last_of(*w, before, after), -bytes);
    }
    if (insert) {
      runs.insert(runs.begin() + place, slot);
    } else {
      runs.erase(runs.begin() + place);
    }
    for (auto r = reads.begin(op); r != reads.end(op); ++r) {
      const int maker = producer[*r];
      auto& at = reads_at_[*r];
      const auto found = std::lower_bound(at.begin(), at.end(), slot);
      if (!insert) at.erase(found);
      const int copy = count_before(runs_[maker], slot);
      if (copy && size[*r] && !(slot >= boundary_ && is_held(*r))) {
        const int last = last_of(*r, runs_[maker][copy - 1], next_run(maker, copy));
        if (slot > last) tree_.add(last + 1, slot, insert ? size[*r] : -size[*r]);
      }
      if (insert) at.insert(std::lower_bound(at.begin(), at.end(), slot), slot);
    }
    const int64_t sign = insert ? 1 : -1;
    tree_.add(slot, slot, sign * (workspace[op] + (before >= 0 ? rerun[op] : 0)));
    if (rerun[op] && before < 0 && after < num_slots_) tree_.add(after, after, sign * rerun[op]);
    at_[slot] = insert ? op : -1;
    cost_ += double(sign) * cost[op];
    num_runs_ += int(sign);
    const size_t fewest = op_flags[op] & (kInForward | kInBackward | kWanted) ? 1 : 0;
    if (insert && runs.size() == fewest + 1) {
      place_[op] = int(spare_.size());
      spare_.push_back(op);
    } else if (!insert && runs.size() == fewest) {
      spare_[place_[op]] = spare_.back();
      place_[spare_.back()] = place_[op];
      spare_.pop_back();
      place_[op] = -1;
    }
    log_.push_back({op, slot, insert});
  }

  void undo(size_t length) {
    while (log_.size() > length) {
      const Change last = log_.back();
      change(last.op, last.slot, !last.inserted);
      log_.pop_back();
      log_.pop_back();
    }
  }

  // ---- what may change ---------------------------------------------------------------------------------------------------------

  // A forward output's copy from forward is there to the end: backward reads it, and what it makes of the value dies at once.
  bool is_held(int value) const { return (value_flags[value] & (kOutput | kNeverSaved)) == kOutput; }
  bool may_cross(int value) const { return !(value_flags[value] & kNeverSaved); }

  bool can_insert(int op, int slot) const {
    if (slot < 0 || slot >= num_slots_ || at_[slot] >= 0) return false;
    if (op_flags[op] & kInBackward && slot < boundary_) return false;
    if (op_flags[op] & kPinned && !runs_[op].empty()) return false;
    return can_read(op, slot);
  }

  bool can_read(int op, int slot) const {
    for (auto r = reads.begin(op); r != reads.end(op); ++r) {
      const auto& made = runs_[producer[*r]];
      if (made.empty() || made[0] > slot) return false;
      if (slot >= boundary_ && !may_cross(*r) && made[count_before(made, slot) - 1] < boundary_) return false;
    }
    return true;
  }

  bool has_readers(int value, int made, int next) const {
    if (made >= boundary_ && is_held(value)) return false;
    const auto& at = reads_at_[value];
    const auto found = std::lower_bound(at.begin(), at.end(), made);
    return found != at.end() && *found < next;
  }

  bool is_owed(int op, int place) const {  // would something that must happen not happen without this run?
    const auto& runs = runs_[op];
    if (op_flags[op] & (kWanted | kInBackward) && runs.size() == 1) return true;
    return op_flags[op] & kInForward && runs[place] < boundary_ && count_before(runs, boundary_) == 1;
  }

  bool can_remove(int op, int place) const {
    const auto& runs = runs_[op];
    if (is_owed(op, place)) return false;
    const int next = next_run(op, place + 1);
    for (auto w = writes.begin(op); w != writes.end(op); ++w) {
      if (has_readers(*w, runs[place], next)) {
        if (!place) return false;
        if (!may_cross(*w) && runs[place - 1] < boundary_ && next > boundary_) return false;
      }
      if (value_flags[*w] & kGradient && !may_cross(*w) && next >= num_slots_ && (!place || runs[place - 1] < boundary_)) return false;
    }
    return true;
  }

  bool is_idle(int op, int place) const {  // nobody reads what this run makes, and nobody is owed it
    const auto& runs = runs_[op];
    if (is_owed(op, place)) return false;
    const int next = next_run(op, place + 1);
    for (auto w = writes.begin(op); w != writes.end(op); ++w) {
      if (has_readers(*w, runs[place], next)) return false;
      if (value_flags[*w] & kGradient && !may_cross(*w) && next >= num_slots_ && (!place || runs[place - 1] < boundary_)) return false;
    }
    return true;
  }

  // Takes away the run at `slot`, and every run that only made something for it.
  void take_away(int slot) {
    const size_t start = todo_.size();
    todo_.push_back(slot);
    bool first = true;
    while (todo_.size() > start) {
      const int at = todo_.back();
      todo_.pop_back();
      const int op = at_[at];
      if (op < 0) continue;
      if (!first && !is_idle(op, count_before(runs_[op], at))) continue;
      first = false;
      change(op, at, false);
      for (auto r = reads.begin(op); r != reads.end(op); ++r) {
        const auto& made = runs_[producer[*r]];
        const int copy = count_before(made, at);
        if (copy) todo_.push_back(made[copy - 1]);
      }
    }
  }

  int empty_before(int slot, int lowest) {  // the nearest empty slot below `slot`, not below `lowest`; -1 if there is none near
    for (int at = slot - 1, end = std::max(lowest, slot - kScanSlots); at >= end; --at)
      if (at_[at] < 0) return at;
    if (slot - lowest > kScanSlots || lowest >= slot) ++crowded_;
    return -1;
  }

  int empty_near(int slot, int lowest, int highest) const {
    for (int step = 0; step < kScanSlots; ++step) {
      if (slot - step >= lowest && at_[slot - step] < 0) return slot - step;
      if (slot + step <= highest && at_[slot + step] < 0) return slot + step;
    }
    return -1;
  }

  // ---- moves -------------------------------------------------------------------------------------------------------------------

  int hot_slot() {
    if (random.below(4)) return tree_.peak_slot();
    const int64_t line = std::min(target_, tree_.most()) / 16 * 15;
    const int found = tree_.first_above(random.below(num_slots_), line);
    return found >= 0 ? found : tree_.peak_slot();
  }

  int random_run() {
    for (int i = 0; i < 64; ++i) {
      const int slot = random.below(num_slots_);
      if (at_[slot] >= 0) return slot;
    }
    return -1;
  }

  // Where the run at `slot` may go without another run of its op, or a reader of what it makes, being passed.
  bool window(int slot, int* low, int* high) const {
    const int op = at_[slot], place = count_before(runs_[op], slot);
    *low = place ? runs_[op][place - 1] + 1 : 0;
    *high = next_run(op, place + 1) - 1;
    bool bound = op_flags[op] & kInBackward || is_owed(op, place);
    for (auto r = reads.begin(op); r != reads.end(op); ++r) {
      const auto& made = runs_[producer[*r]];
      *low = std::max(*low, (may_cross(*r) ? made[0] : made[count_before(made, slot) - 1]) + 1);
      bound |= !may_cross(*r);
    }
    for (auto w = writes.begin(op); w != writes.end(op); ++w) {
      const auto& at = reads_at_[*w];
      const auto found = std::lower_bound(at.begin(), at.end(), slot);
      if (found != at.end()) *high = std::min(*high, *found - 1);
      bound |= !may_cross(*w);
    }
    if (bound && slot < boundary_) *high = std::min(*high, boundary_ - 1);
    if (bound && slot >= boundary_) *low = std::max(*low, boundary_);
    return *low < *high;
  }

  bool relocate() {
    const int slot = random_run();
    int low, high;
    if (slot < 0 || !window(slot, &low, &high)) return false;
    int target;
    if (random.below(2)) {
      const int reach = 64;
      low = std::max(low, slot - reach), high = std::min(high, slot + reach);
    }
    target = empty_near(low + random.below(high - low + 1), low, high);
    if (target < 0) return false;
    const int op = at_[slot];
    change(op, slot, false);
    change(op, target, true);
    return true;
  }

  bool insert_one() {
    const int op = random.below(num_ops), slot = random.below(num_slots_);
    if (!can_insert(op, slot)) return false;
    change(op, slot, true);
    return true;
  }

  bool erase_one() {
    if (spare_.empty()) return false;
    const int op = spare_[random.below(int(spare_.size()))];
    const int place = random.below(int(runs_[op].size()));
    if (!can_remove(op, place)) return false;
    const int64_t before = std::max(tree_.most(), target_);
    const double worth = cost_;
    take_away(runs_[op][place]);
    for (int i = 0; i < kMaxRepairs && tree_.most() > before; ++i) {
      if (cost_ > worth || !best_drop(tree_.peak_slot(), kSamples)) break;
    }
    return true;
  }

  // A value that is live at `slot` and not used there: the slot of its next reader, or -1.
  int idle_until(int value, int slot, int* made) const {
    const int op = producer[value];
    if (op < 0 || !size[value] || op_flags[op] & kPinned) return -1;
    const auto& runs = runs_[op];
    const int copy = count_before(runs, slot + 1);
    if (!copy || runs[copy - 1] == slot) return -1;
    const auto& at = reads_at_[value];
    const auto found = std::lower_bound(at.begin(), at.end(), slot);
    if (found == at.end() || *found == slot || *found > next_run(op, copy)) return -1;
    *made = runs[copy - 1];
    if (value_flags[value] & kOutput && next_run(op, copy) >= boundary_ && *found >= boundary_ && (*made < boundary_ || is_held(value))) return -1;
    return *found;
  }

  // Runs `op` just before `slot`, and so on for those of its operands that would have to be kept over a full stretch for it.
  bool rebuild(int op, int slot, int after, int64_t line) {
    if (log_.size() > log_limit_ || op_flags[op] & kPinned) return false;
    const int lowest = std::max(after + 1, op_flags[op] & kInBackward ? boundary_ : 0);
    const int at = empty_before(slot, slot >= boundary_ && after < boundary_ ? std::max(lowest, boundary_) : lowest);
    if (at < 0 || !can_insert(op, at)) return false;
    const int num_reads = int(reads.end(op) - reads.begin(op));
    int lasts[16];
    for (int i = 0; i < num_reads && i < 16; ++i) {
      const int value = reads.begin(op)[i], maker = producer[value], copy = count_before(runs_[maker], at);
      lasts[i] = at >= boundary_ && is_held(value) ? at : last_of(value, runs_[maker][copy - 1], next_run(maker, copy));
    }
    change(op, at, true);
    for (int i = 0; i < num_reads && i < 16; ++i) {
      const int value = reads.begin(op)[i];
      if (lasts[i] >= at - 1 || !size[value]) continue;
      const int from = std::max(lasts[i], after);
      if (tree_.most(lasts[i] + 1, at - 1) <= line) continue;
      const size_t length = log_.size();
      if (!rebuild(producer[value], at, from, line)) undo(length);
    }
    return true;
  }

  // Frees `value` over the idle stretch around `slot`: makes it again before its next reader, or only then if nobody read it before.
  bool drop(int value, int slot, int64_t line) {
    int made;
    const int reader = idle_until(value, slot, &made);
    if (reader < 0) return false;
    const int op = producer[value];
    log_limit_ = log_.size() + kMaxChanges;
    if (!rebuild(op, reader, slot, line)) return false;
    const int place = count_before(runs_[op], made);
    if (is_idle(op, place)) take_away(made);
    return true;
  }

  bool drop_one(int slot) {
    int best_value = -1;
    double best_score = -1;
    const int num_tries = 1 + random.below(6);
    int found = 0, made;
    for (int i = 0; i < 96 && found < num_tries; ++i) {
      const int value = random.below(num_values);
      const int reader = idle_until(value, slot, &made);
      if (reader < 0) continue;
      ++found;
      const bool moves = is_first_reader(value, made, reader);
      const double score = double(size[value]) / (moves ? 1e-9 : cost[producer[value]] / base_cost_ + 1e-9);
      if (score > best_score) best_score = score, best_value = value;
    }
    if (best_value < 0) return false;
    const int64_t line = std::min(target_, tree_.most() - 1);
    return drop(best_value, slot, line);
  }

  bool is_first_reader(int value, int made, int reader) const {
    const auto& at = reads_at_[value];
    const auto found = std::lower_bound(at.begin(), at.end(), made);
    return found != at.end() && *found == reader;
  }

  // Of `num_samples` values (all if that is as many as there are) the drop that lowers what stands above the target at least cost.
  bool best_drop(int slot, int num_samples) {
    const bool all = num_samples >= num_values;
    const int64_t line = target_, peak = tree_.most();
    const double before = cost_;
    sample_.clear();
    int made;
    for (int i = 0; i < (all ? num_values : 32 * num_samples) && int(sample_.size()) < num_samples; ++i) {
      const int value = all ? i : random.below(num_values);
      if (idle_until(value, slot, &made) >= 0) sample_.push_back(value);
    }
    int chosen = -1;
    double best_score = 0;
    const int64_t here = tree_.most(slot, slot);
    for (const int value : sample_) {
      const size_t length = log_.size();
      if (drop(value, slot, line)) {
        const int64_t gained = here - std::max(target_, tree_.most(slot, slot));
        const int64_t worse = std::max<int64_t>(0, tree_.most() - peak);
        const double paid = (cost_ - before) / base_cost_;
        if (gained > worse) {
          const double score = double(gained - worse) / (std::max(paid, 0.0) + 1e-7);
          if (score > best_score) best_score = score, chosen = value;
        }
      }
      undo(length);
    }
    return chosen >= 0 && drop(chosen, slot, line);
  }

  // Runs the last reader of something live at `slot` before `slot`, together with what it needs from between.
  bool advance(int slot) {
    for (int i = 0; i < 24; ++i) {
      const int value = random.below(num_values);
      int made;
      const int reader = idle_until(value, slot, &made);
      if (reader < 0) continue;
      const auto& at = reads_at_[value];
      const auto found = std::upper_bound(at.begin(), at.end(), reader);
      if (found != at.end() && *found < next_run(producer[value], count_before(runs_[producer[value]], made + 1)) && random.below(4)) continue;
      return pull(reader, slot);
    }
    return false;
  }

  bool pull(int reader, int slot) {
    if (reader >= boundary_ && slot < boundary_) return false;
    pulled_.assign(1, reader);
    int lowest = -1;
    for (size_t i = 0; i < pulled_.size(); ++i) {
      const int op = at_[pulled_[i]];
      for (auto r = reads.begin(op); r != reads.end(op); ++r) {
        const auto& runs = runs_[producer[*r]];
        const int made = runs[count_before(runs, pulled_[i]) - 1];
        if (made == slot) return false;
        if (made < slot) {
          lowest = std::max(lowest, made);
        } else if (std::find(pulled_.begin(), pulled_.end(), made) == pulled_.end()) {
          if (pulled_.size() >= kMaxPulled) return false;
          pulled_.push_back(made);
        }
      }
    }
    if (slot >= boundary_) lowest = std::max(lowest, boundary_ - 1);
    std::sort(pulled_.begin(), pulled_.end());
    int target = slot;
    todo_.clear();
    for (size_t i = 0; i < pulled_.size(); ++i) {
      target = empty_before(target, lowest + 1);
      if (target < 0) return false;
      todo_.push_back(target);
    }
    const std::vector<int32_t> targets(todo_.rbegin(), todo_.rend());
    todo_.clear();
    for (size_t i = 0; i < pulled_.size(); ++i) {
      const int op = at_[pulled_[i]], place = count_before(runs_[op], pulled_[i]);
      if (place && runs_[op][place - 1] >= targets[i]) return false;
      change(op, pulled_[i], false);
      change(op, targets[i], true);
    }
    return true;
  }
};

Rows rows_of(int count, const int32_t* starts, const int32_t* items) {
  return {{starts, starts + count + 1}, {items, items + starts[count]}};
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

struct SequenceArrays {  // as passes/solvers/order.py fills it; reads are of values that an op makes
  int32_t num_values, num_ops;
  const int32_t *read_starts, *reads, *write_starts, *writes, *producer;
  const int64_t *size, *workspace, *rerun;
  const double* cost;
  const uint8_t *op_flags, *value_flags;
  int64_t tangent_bytes;
  uint64_t seed;
};

void* dyngran_sequence_new(const SequenceArrays* from) {
  auto* made = new Sequence;
  const int num_values = made->num_values = from->num_values, num_ops = made->num_ops = from->num_ops;
  made->reads = rows_of(num_ops, from->read_starts, from->reads);
  made->writes = rows_of(num_ops, from->write_starts, from->writes);
  made->producer.assign(from->producer, from->producer + num_values);
  made->size.assign(from->size, from->size + num_values);
  made->workspace.assign(from->workspace, from->workspace + num_ops);
  made->rerun.assign(from->rerun, from->rerun + num_ops);
  made->cost.assign(from->cost, from->cost + num_ops);
  made->op_flags.assign(from->op_flags, from->op_flags + num_ops);
  made->value_flags.assign(from->value_flags, from->value_flags + num_values);
  made->tangent_bytes = from->tangent_bytes;
  made->random = Random(from->seed);
  return made;
}

void dyngran_sequence_free(void* sequence) { delete static_cast<Sequence*>(sequence); }

void dyngran_sequence_load(void* sequence, const int32_t* ops, int32_t num_forward, int32_t num_total, int64_t budget) {
  auto* self = static_cast<Sequence*>(sequence);
  self->budget = budget;
  self->load(ops, num_forward, num_total);
}

int64_t dyngran_sequence_run(void* sequence, int64_t target, int32_t num_moves, double hot, double cold, double bytes_weight, const double* mix) {
  return static_cast<Sequence*>(sequence)->run(target, num_moves, hot, cold, bytes_weight, mix);
}

int32_t dyngran_sequence_reach(void* sequence, int64_t target, int32_t max_steps) {
  return static_cast<Sequence*>(sequence)->reach(target, max_steps);
}

void dyngran_sequence_restart(void* sequence) { static_cast<Sequence*>(sequence)->restart_from_best(); }

int64_t dyngran_sequence_peak(void* sequence) { return static_cast<Sequence*>(sequence)->peak(); }
double dyngran_sequence_cost(void* sequence) { return static_cast<Sequence*>(sequence)->total_cost(); }
int64_t dyngran_sequence_best_peak(void* sequence) { return static_cast<Sequence*>(sequence)->best_peak; }
double dyngran_sequence_best_cost(void* sequence) { return static_cast<Sequence*>(sequence)->best_cost; }

int32_t dyngran_sequence_best(void* sequence, int32_t* ops, int32_t capacity, int32_t* num_forward) {  // returns how many there are
  const auto* self = static_cast<Sequence*>(sequence);
  *num_forward = self->best_forward;
  std::copy_n(self->best.begin(), std::min<size_t>(capacity, self->best.size()), ops);
  return int32_t(self->best.size());
}

}  // extern "C"
#pragma GCC visibility pop
