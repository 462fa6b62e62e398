#pragma once

#include <cstdint>

namespace dyngran {

struct PathOption {       // one way to run regions first .. end - 1
  int32_t first, end;
  int32_t saves_output;   // 1 if the values that leave for the next region are saved
  int32_t unused;
  int64_t input_bytes;    // saved for it, if the region before has not saved them
  int64_t saved_bytes;    // saved from the values that it makes
  int64_t forward_peak_bytes, backward_peak_bytes;  // most live in its own forward and backward, without what enters
  double time_us;
};

// Fills `chosen` (num_regions + 1 places) with option numbers along the path of least time whose regions all stay within the budget, -1
// behind the last; `forward_extra` and `backward_extra` are bytes live beside each region's own and what earlier regions saved. Returns the
// time (us), -1 if nothing fits. Exact but for a selection: of the ways to reach a region whose saved bytes fall into the same of
// `num_bins` bins only the fastest is followed.
double choose(int num_regions, int num_options, const PathOption* options, const int64_t* forward_extra, const int64_t* backward_extra,
              int64_t budget_bytes, int num_bins, int32_t* chosen);

}  // namespace dyngran
