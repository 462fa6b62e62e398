// What passes/native calls by ctypes. Handles are owned by Python objects; nothing here throws across the border.
#include <algorithm>
#include <cstring>

#include "choose.h"
#include "search.h"

using namespace dyngran;

namespace {

Rows make_rows(int num_rows, const int32_t* starts, const int32_t* items) {
  return {{starts, starts + num_rows + 1}, {items, items + starts[num_rows]}};
}

Rows as_rows(const std::vector<std::vector<int32_t>>& found) {
  Rows rows{{0}, {}};
  for (const auto& row : found) {
    rows.items.insert(rows.items.end(), row.begin(), row.end());
    rows.starts.push_back(int32_t(rows.items.size()));
  }
  return rows;
}

Rows find_neighbours(const Graph& graph) {
  std::vector<std::vector<int32_t>> found(graph.num_values);
  for (int op = 0; op < graph.num_ops; ++op) {
    for (auto write = graph.writes.begin(op); write != graph.writes.end(op); ++write) {
      if (graph.late[*write]) continue;
      for (auto read = graph.reads.begin(op); read != graph.reads.end(op); ++read) {
        if (graph.given[*read] || graph.late[*read]) continue;
        found[*write].push_back(*read);
        found[*read].push_back(*write);
      }
    }
  }
  return as_rows(found);
}

Rows find_readers(const Graph& graph) {
  std::vector<std::vector<int32_t>> found(graph.num_values);
  for (int op = 0; op < graph.num_ops; ++op)
    for (auto read = graph.reads.begin(op); read != graph.reads.end(op); ++read)
      if (found[*read].empty() || found[*read].back() != op) found[*read].push_back(op);
  return as_rows(found);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

struct GraphArrays {  // as passes/native/graph.py fills it
  int32_t num_values, num_ops, num_spaces, fused, segment_ops;
  double launch_us, bytes_per_us;
  const int32_t *read_starts, *reads, *write_starts, *writes, *need_starts, *needs;
  const int64_t *live, *full, *workspace, *rerun_workspace;
  const double* cost;
  const uint8_t* op_flags;      // 1 fusible, 2 reduction, 4 pinned, 8 never saved, 16 forward, 32 backward
  const int32_t *space, *producer;
  const uint8_t* value_flags;   // 1 always kept, 2 output, 4 gradient, 8 tangent, 16 depends on a tangent, 32 never saved
  int32_t num_wanted, num_late_wanted;
  const int32_t *wanted, *late_wanted;
  const int32_t *form_starts, *forms, *form_of, *loader, *barred_starts, *barred, *again_starts, *again;
  const int32_t *fetch, *fetched_starts, *fetched;
  const double* copy_us;
};

uint32_t dyngran_version() { return DYNGRAN_NATIVE_VERSION; }

Graph* dyngran_graph_new(const GraphArrays* from) {
  auto* graph = new Graph;
  const int num_values = graph->num_values = from->num_values, num_ops = graph->num_ops = from->num_ops;
  graph->num_spaces = from->num_spaces;
  graph->fused = from->fused;
  graph->segment_ops = from->segment_ops;
  graph->launch_us = from->launch_us;
  graph->bytes_per_us = from->bytes_per_us;
  graph->reads = make_rows(num_ops, from->read_starts, from->reads);
  graph->writes = make_rows(num_ops, from->write_starts, from->writes);
  graph->needs = make_rows(num_ops, from->need_starts, from->needs);
  graph->live.assign(from->live, from->live + num_values);
  graph->full.assign(from->full, from->full + num_values);
  graph->workspace.assign(from->workspace, from->workspace + num_ops);
  graph->rerun_workspace.assign(from->rerun_workspace, from->rerun_workspace + num_ops);
  graph->cost.assign(from->cost, from->cost + num_ops);
  graph->space.assign(from->space, from->space + num_ops);
  graph->producer.assign(from->producer, from->producer + num_values);
  for (int op = 0; op < num_ops; ++op) {
    const int flags = from->op_flags[op];
    graph->fusible.push_back(flags & 1);
    graph->reduction.push_back(flags >> 1 & 1);
    graph->pinned.push_back(flags >> 2 & 1);
    graph->never_saved.push_back(flags >> 3 & 1);
    graph->early_ran.push_back(flags >> 4 & 1);
    if (flags & 16) graph->forward_ops.push_back(op);
    if (flags & 32) graph->backward_ops.push_back(op);
  }
  graph->tangent_bytes = 0;
  for (int value = 0; value < num_values; ++value) {
    const int flags = from->value_flags[value];
    graph->given.push_back(graph->producer[value] < 0);
    graph->small.push_back(flags & 1);
    graph->output.push_back(flags >> 1 & 1);
    graph->gradient.push_back(flags >> 2 & 1);
    graph->tangent.push_back(flags >> 3 & 1);
    graph->late.push_back(flags >> 4 & 1);
    graph->dropped.push_back(flags >> 5 & 1);
    if (flags & 8) graph->tangent_bytes += graph->live[value];
  }
  graph->wanted.assign(from->wanted, from->wanted + from->num_wanted);
  graph->late_wanted.assign(from->late_wanted, from->late_wanted + from->num_late_wanted);
  graph->forms = make_rows(num_values, from->form_starts, from->forms);
  graph->form_of.assign(from->form_of, from->form_of + num_values);
  graph->barred = make_rows(num_values, from->barred_starts, from->barred);
  graph->again = make_rows(num_values, from->again_starts, from->again);
  graph->fetch.assign(from->fetch, from->fetch + num_ops);
  graph->fetched = make_rows(num_ops, from->fetched_starts, from->fetched);
  graph->copy_us.assign(from->copy_us, from->copy_us + num_values);
  for (int value = 0; value < num_values; ++value)
    if (graph->copy_us[value] > 0) graph->copied.push_back(value);
  graph->loader.assign(from->loader, from->loader + num_values);
  graph->readers = find_readers(*graph);
  graph->neighbours = find_neighbours(*graph);
  graph->node_count = count_nodes(*graph);
  return graph;
}

void dyngran_graph_free(Graph* graph) { delete graph; }

Search* dyngran_search_new(const Graph* graph) { return new Search(*graph); }

void dyngran_search_free(Search* search) { delete search; }

// Fills `crossing` (one byte per value) and `outcome` for the values marked in `wished`.
void dyngran_evaluate(Search* search, const uint8_t* wished, uint8_t* crossing, Outcome* outcome) {
  *outcome = search->replay().move_to(search->normalizer.normalize(wished));
  std::memcpy(crossing, search->replay().crossing().data(), size_t(search->graph.num_values));
}

void dyngran_normalize(Search* search, const uint8_t* wished, uint8_t* crossing) {
  std::memcpy(crossing, search->normalizer.normalize(wished).data(), size_t(search->graph.num_values));
}

// Op and bytes live per kernel of what was evaluated last; both have Outcome.num_kernels places.
void dyngran_curve(const Search* search, int32_t* ops, int64_t* live_bytes) {
  std::vector<int32_t> found_ops;
  std::vector<int64_t> found_bytes;
  search->replay().curve(found_ops, found_bytes);
  std::copy(found_ops.begin(), found_ops.end(), ops);
  std::copy(found_bytes.begin(), found_bytes.end(), live_bytes);
}

// Most bytes live in each region, of what was evaluated last. `forward_place` and `backward_place` are the region of each op, -1 where it
// says nothing: such a kernel belongs to the one before it in forward, to the next one in backward (it is made for that one).
void dyngran_region_peaks(const Search* search, int32_t num_forward, const int32_t* forward_place, const int32_t* backward_place,
                          int64_t* forward_peaks, int64_t* backward_peaks) {
  std::vector<int32_t> ops;
  std::vector<int64_t> live;
  search->replay().curve(ops, live);
  const auto note = [&](size_t position, const int32_t* place, int32_t& region, int64_t* peaks) {
    if (place[ops[position]] >= 0) region = place[ops[position]];
    peaks[region] = std::max(peaks[region], live[position]);
  };
  int32_t region = 0;
  for (size_t position = 0; position < size_t(num_forward); ++position) note(position, forward_place, region, forward_peaks);
  for (size_t position = ops.size(); position-- > size_t(num_forward);) note(position, backward_place, region, backward_peaks);
}

int64_t dyngran_walk(Search* search, const uint8_t* start, int32_t num_classes, const int32_t* class_starts, const int32_t* class_values,
                     const Settings* settings, const volatile int32_t* stop) {
  return search->walk(start, make_rows(num_classes, class_starts, class_values), *settings, stop);
}

// The plans that a search has kept: on the frontier of peak and time, or options by saved bytes, peak and time.
int32_t dyngran_num_entries(const Search* search, int32_t of_options) {
  return int32_t(of_options ? search->options.size() : search->archive.entries.size());
}

void dyngran_entries(const Search* search, int32_t of_options, Outcome* outcomes, uint8_t* crossings) {
  const size_t width = size_t(search->graph.num_values);
  const auto write = [&](const Entry& entry) {
    *outcomes++ = entry.outcome;
    std::memcpy(crossings, entry.crossing.data(), width);
    crossings += width;
  };
  if (of_options) {
    for (const Entry& entry : search->options) write(entry);
  } else {
    for (const auto& item : search->archive.entries) write(item.second);
  }
}

void dyngran_clear(Search* search) {
  search->archive.entries.clear();
  search->options.clear();
}

double dyngran_choose(int32_t num_regions, int32_t num_options, const PathOption* options, const int64_t* forward_extra,
                      const int64_t* backward_extra, int64_t budget_bytes, int32_t num_bins, int32_t* chosen) {
  return choose(num_regions, num_options, options, forward_extra, backward_extra, budget_bytes, num_bins, chosen);
}
}
#pragma GCC visibility pop
