// Who has done what, and who knows of it: vector clocks of streams and threads, and the memory they use.
//
// An actor is a stream (its id, 0 is the default stream) or a thread of the host (below zero). Each
// access to memory is stamped with its actor's time. Two accesses of which one writes are a race if
// the later actor does not know the time of the earlier one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace stream_clock {

using Clock = std::map<int64_t, int64_t>;

struct Event {
  Clock known;
  double time = 0;  // milliseconds of a clock on which each kernel takes one
};

// Streams
int64_t current_stream();
int64_t exchange_stream(int64_t stream);
int64_t new_stream();
void record(Event& event, int64_t stream);
void block(const Event& event, int64_t stream);
void synchronize(const Event& event);
void synchronize_stream(int64_t stream);
void synchronize_device();
bool is_known_to_host(const Event& event);

// Kernels: `launch` starts one on the current stream, the accesses that follow are its own
void launch(const std::string& kernel);
void access(const void* start, size_t bytes, bool writes);

// Memory
void allocated(void* start, size_t bytes, bool on_device);
void freed(void* start);
void used_on(void* start, int64_t stream);
bool is_tracked_host_memory(const void* pointer);

}  // namespace stream_clock
