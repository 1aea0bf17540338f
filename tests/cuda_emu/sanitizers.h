// What ThreadSanitizer and AddressSanitizer are told about emulated devices, and nothing in builds without them.
// Invariant: the emulator's own code is not instrumented, so every ordering that ThreadSanitizer knows of comes from
// the calls made here: enqueueing, events, host waits, collectives, barriers. Kernels and the code under test are
// instrumented. What streams and CUDA threads do in the emulator is Unseen, unless it is to memory of one launch alone:
// copying and allocating, which are calls that ThreadSanitizer replaces, too; what they access for the program is said
// by will_read and will_write.
#pragma once
#include <cstddef>

#if defined(CUDA_EMU_THREAD)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* object);
void __tsan_release(void* object);
void __tsan_read_range(void* data, std::size_t bytes);
void __tsan_write_range(void* data, std::size_t bytes);
void __tsan_ignore_thread_begin();
void __tsan_ignore_thread_end();
}
#endif
#if defined(CUDA_EMU_ADDRESS)
extern "C" {
void __asan_poison_memory_region(const volatile void* data, std::size_t bytes);
void __asan_unpoison_memory_region(const volatile void* data, std::size_t bytes);
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, std::size_t bytes);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, std::size_t* bytes);
}
#endif

namespace cuda_emu {

#if defined(CUDA_EMU_THREAD)
inline constexpr bool kThreadSanitizer = true;
inline void* this_fiber() { return __tsan_get_current_fiber(); }
inline void* new_fiber() { return __tsan_create_fiber(0); }
inline void delete_fiber(void* fiber) { __tsan_destroy_fiber(fiber); }
inline void switch_fiber(void* fiber) { __tsan_switch_to_fiber(fiber, 1); }  // 1: the switch orders nothing
inline void acquire(const void* object) { __tsan_acquire(const_cast<void*>(object)); }
inline void release(const void* object) { __tsan_release(const_cast<void*>(object)); }
struct Unseen {
  Unseen() { __tsan_ignore_thread_begin(); }
  ~Unseen() { __tsan_ignore_thread_end(); }
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;
};
struct Seen {  // inside of Unseen
  Seen() { __tsan_ignore_thread_end(); }
  ~Seen() { __tsan_ignore_thread_begin(); }
  Seen(const Seen&) = delete;
  Seen& operator=(const Seen&) = delete;
};
inline void reads(const void* data, std::size_t bytes) { __tsan_read_range(const_cast<void*>(data), bytes); }
// Of a stream's work, inside of Unseen.
inline void will_read(const void* data, std::size_t bytes) {
  const Seen seen;
  reads(data, bytes);
}
inline void will_write(void* data, std::size_t bytes) {
  const Seen seen;
  __tsan_write_range(data, bytes);
}
#else
inline constexpr bool kThreadSanitizer = false;
inline void* this_fiber() { return nullptr; }
inline void* new_fiber() { return nullptr; }
inline void delete_fiber(void*) {}
inline void switch_fiber(void*) {}
inline void acquire(const void*) {}
inline void release(const void*) {}
struct Unseen {
  Unseen() {}  // not trivial: used as a scope
  ~Unseen() {}
};
using Seen = Unseen;
inline void reads(const void*, std::size_t) {}
inline void will_read(const void*, std::size_t) {}
inline void will_write(void*, std::size_t) {}
#endif

#if defined(CUDA_EMU_ADDRESS)
inline void poison(const void* data, std::size_t bytes) { __asan_poison_memory_region(data, bytes); }
inline void unpoison(const void* data, std::size_t bytes) { __asan_unpoison_memory_region(data, bytes); }
inline void leaving_stack(void** fake, const void* bottom, std::size_t bytes) {
  __sanitizer_start_switch_fiber(fake, bottom, bytes);
}
inline void entered_stack(void* fake, const void** bottom, std::size_t* bytes) {
  __sanitizer_finish_switch_fiber(fake, bottom, bytes);
}
#else
inline void poison(const void*, std::size_t) {}
inline void unpoison(const void*, std::size_t) {}
inline void leaving_stack(void**, const void*, std::size_t) {}
inline void entered_stack(void*, const void**, std::size_t*) {}
#endif

}  // namespace cuda_emu
