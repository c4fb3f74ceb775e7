#include "stream_clock.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace stream_clock {
namespace {

struct Access {
  int64_t actor, time;
  uintptr_t begin, end;
  bool writes;
  std::string kernel;
};

struct Block {
  uintptr_t end = 0;
  int64_t stream = 0;  // for which it was allocated
  bool on_device = true;
  std::set<int64_t> streams;  // the allocator waits for these before it uses the block again
  std::vector<Access> accesses;
};

std::recursive_mutex lock;
std::map<int64_t, Clock> clocks;
std::map<int64_t, double> times;
std::map<uintptr_t, Block> blocks;
std::map<int64_t, Clock> handed_over;
std::vector<std::string> races;
int64_t last_stream = 100, last_thread = -1, last_hand_over = 0;
thread_local int64_t stream_here = 0;
thread_local int64_t thread_here = -1;  // threads that Python did not start act for the main thread
thread_local std::string kernel_here;

using Guard = std::lock_guard<std::recursive_mutex>;

void join(Clock& clock, const Clock& other) {
  for (const auto& [actor, time] : other) clock[actor] = std::max(clock[actor], time);
}

std::string name(int64_t actor) {
  return actor < 0 ? "thread " + std::to_string(-actor) : "stream " + std::to_string(actor);
}

void report(const std::string& race) {
  if (std::find(races.begin(), races.end(), race) == races.end()) races.push_back(race);
}

// What is enqueued on a stream comes after all that its thread knows of.
void enqueue(int64_t stream) {
  join(clocks[stream], clocks[thread_here]);
  times[stream] = std::max(times[stream], times[thread_here]);
}

Block* block_of(uintptr_t pointer) {
  auto next = blocks.upper_bound(pointer);
  if (next == blocks.begin()) return nullptr;
  Block& block = std::prev(next)->second;
  return pointer < block.end ? &block : nullptr;
}

void access_by(int64_t actor, const void* start, size_t bytes, bool writes, const std::string& kernel) {
  auto begin = reinterpret_cast<uintptr_t>(start), end = begin + bytes;
  Block* block = bytes ? block_of(begin) : nullptr;
  if (!block) return;  // memory of the host that no stream can use behind its back
  Clock& known = clocks[actor];
  auto& accesses = block->accesses;
  for (const auto& earlier : accesses) {
    bool conflict = (writes || earlier.writes) && earlier.begin < end && begin < earlier.end;
    if (conflict && known[earlier.actor] < earlier.time)
      report(kernel + " on " + name(actor) + (writes ? " writes" : " reads") + " what " + earlier.kernel +
             " on " + name(earlier.actor) + (earlier.writes ? " writes" : " reads") + ", unordered");
  }
  std::erase_if(accesses, [&](const Access& earlier) {
    bool covered = begin <= earlier.begin && earlier.end <= end && (writes || !earlier.writes);
    return covered && (writes || earlier.actor == actor) && known[earlier.actor] >= earlier.time;
  });
  accesses.push_back({actor, known[actor], begin, end, writes, kernel});
}

}  // namespace

int64_t current_stream() { return stream_here; }

int64_t exchange_stream(int64_t stream) { return std::exchange(stream_here, stream); }

int64_t new_stream() {
  Guard guard(lock);
  return ++last_stream;
}

void record(Event& event, int64_t stream) {
  Guard guard(lock);
  enqueue(stream);
  event = {clocks[stream], times[stream]};
}

void block(const Event& event, int64_t stream) {
  Guard guard(lock);
  join(clocks[stream], event.known);
  times[stream] = std::max(times[stream], event.time);
}

void synchronize(const Event& event) {
  Guard guard(lock);
  join(clocks[thread_here], event.known);
  times[thread_here] = std::max(times[thread_here], event.time);
}

void synchronize_stream(int64_t stream) {
  Event event;
  record(event, stream);
  synchronize(event);
}

void synchronize_device() {
  Guard guard(lock);
  std::vector<int64_t> streams;
  for (const auto& [actor, clock] : clocks)
    if (actor >= 0) streams.push_back(actor);
  for (auto stream : streams) synchronize_stream(stream);
}

bool is_known_to_host(const Event& event) {
  Guard guard(lock);
  Clock& known = clocks[thread_here];
  return std::all_of(event.known.begin(), event.known.end(),
                     [&](const auto& entry) { return known[entry.first] >= entry.second; });
}

void launch(const std::string& kernel) {
  Guard guard(lock);
  enqueue(stream_here);
  ++clocks[stream_here][stream_here];
  ++times[stream_here];
  kernel_here = kernel;
}

void access(const void* start, size_t bytes, bool writes) {
  Guard guard(lock);
  access_by(stream_here, start, bytes, writes, kernel_here);
}

void allocated(void* start, size_t bytes, bool on_device) {
  Guard guard(lock);
  auto begin = reinterpret_cast<uintptr_t>(start);
  blocks[begin] = {begin + bytes, stream_here, on_device, {}, {}};
}

// The caching allocator gives a block of the device to the next one who allocates on the same stream,
// without waiting for other streams, unless it was told of them. For page-locked memory torch waits
// for every copy that it has made.
void freed(void* start) {
  Guard guard(lock);
  auto found = blocks.find(reinterpret_cast<uintptr_t>(start));
  if (found == blocks.end()) return;
  const Block& block = found->second;
  enqueue(block.stream);
  for (const auto& earlier : block.accesses) {
    if (!block.on_device || earlier.actor == block.stream || block.streams.count(earlier.actor)) continue;
    if (clocks[block.stream][earlier.actor] < earlier.time)
      report("memory of " + name(block.stream) + " is freed while " + earlier.kernel + " on " +
             name(earlier.actor) + (earlier.writes ? " writes" : " reads") + " it");
  }
  blocks.erase(found);
}

void used_on(void* start, int64_t stream) {
  Guard guard(lock);
  if (Block* block = block_of(reinterpret_cast<uintptr_t>(start))) block->streams.insert(stream);
}

bool is_tracked_host_memory(const void* pointer) {
  Guard guard(lock);
  Block* block = block_of(reinterpret_cast<uintptr_t>(pointer));
  return block && !block->on_device;
}

}  // namespace stream_clock

// For Python

using namespace stream_clock;

extern "C" {

// This thread is an actor of its own from now on.
void new_thread() {
  Guard guard(lock);
  thread_here = --last_thread;
}

// Hand over to another thread what this one knows: it calls `take_over` with the number.
int64_t hand_over() {
  Guard guard(lock);
  handed_over[++last_hand_over] = clocks[thread_here];
  return last_hand_over;
}

void take_over(int64_t number) {
  Guard guard(lock);
  join(clocks[thread_here], handed_over[number]);
}

void host_access(const void* start, int64_t bytes, bool writes) {
  Guard guard(lock);
  ++clocks[thread_here][thread_here];
  access_by(thread_here, start, bytes, writes, "the host");
}

// The next race into `text`, or an empty string.
void next_race(char* text, int64_t size) {
  Guard guard(lock);
  std::string race = races.empty() ? "" : races.front();
  if (!races.empty()) races.erase(races.begin());
  std::strncpy(text, race.c_str(), size - 1);
  text[size - 1] = 0;
}
}
