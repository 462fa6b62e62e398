// The multiple-choice program over a path of regions: one option per group of neighbours, least time, one peak row per region.
#include "choose.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace dyngran {
namespace {

struct Label {  // a way to reach a region: bytes saved by the regions before it, time, and where it came from
  int64_t saved_bytes = 0;
  double time_us = std::numeric_limits<double>::infinity();
  int32_t previous = -1, option = -1;
};

// Labels that no other beats, by saved bytes.
std::vector<Label> settle(const std::vector<Label>& bins) {
  std::vector<Label> kept;
  for (const Label& label : bins)
    if (label.time_us < (kept.empty() ? std::numeric_limits<double>::infinity() : kept.back().time_us)) kept.push_back(label);
  return kept;
}

}  // namespace

double choose(int num_regions, int num_options, const PathOption* options, const int64_t* forward_extra, const int64_t* backward_extra,
              int64_t budget_bytes, int num_bins, int32_t* chosen) {
  if (budget_bytes <= 0) return -1.0;
  std::vector<std::vector<int32_t>> starting(num_regions);
  std::vector<int64_t> peak(num_options);
  for (int i = 0; i < num_options; ++i) {
    const PathOption& option = options[i];
    starting[option.first].push_back(i);
    const int64_t in_forward = *std::max_element(forward_extra + option.first, forward_extra + option.end);
    const int64_t in_backward = *std::max_element(backward_extra + option.first, backward_extra + option.end);
    peak[i] = std::max(option.forward_peak_bytes + in_forward, option.backward_peak_bytes + in_backward);
  }
  // state: region, and whether what enters it is saved already
  std::vector<std::vector<Label>> bins(2 * (num_regions + 1), std::vector<Label>(num_bins)), settled(2 * num_regions);
  const double scale = double(num_bins) / (double(budget_bytes) + 1.0);
  bins[0][0] = {0, 0.0, -1, -1};
  for (int region = 0; region < num_regions; ++region) {
    for (int entered = 0; entered < 2; ++entered) {
      const auto& here = settled[2 * region + entered] = settle(bins[2 * region + entered]);
      for (const int i : starting[region]) {
        const PathOption& option = options[i];
        auto& next = bins[2 * option.end + option.saves_output];
        for (int place = 0; place < int(here.size()); ++place) {
          const int64_t before = here[place].saved_bytes + (entered ? 0 : option.input_bytes), after = before + option.saved_bytes;
          if (before + peak[i] > budget_bytes || after > budget_bytes) break;
          Label& bin = next[int(double(after) * scale)];
          const double time_us = here[place].time_us + option.time_us;
          if (time_us < bin.time_us || (time_us == bin.time_us && after < bin.saved_bytes)) bin = {after, time_us, 2 * place + entered, i};
        }
      }
    }
  }
  Label label;
  for (int entered = 0; entered < 2; ++entered)
    for (const Label& last : bins[2 * num_regions + entered])
      if (last.time_us < label.time_us) label = last;
  if (label.option < 0) return -1.0;
  const double time_us = label.time_us;
  int count = 0;
  while (label.option >= 0) {
    chosen[count++] = label.option;
    const int state = 2 * options[label.option].first + label.previous % 2;
    label = settled[state][label.previous / 2];
  }
  std::reverse(chosen, chosen + count);
  if (count < num_regions) chosen[count] = -1;
  return time_us;
}

}  // namespace dyngran
