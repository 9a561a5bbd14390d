// CUDA C++ on a CPU, for tests: blocks run one after the other, and the threads of a block take turns.
//
// A thread runs until it must wait: at a barrier, or where its warp does something together. Threads, warps and blocks
// run forwards or backwards. An asynchronous copy is made as late as possible, backwards at once. Dynamic shared memory
// is full of NaN first, and the process ends with an access error at its end. So a missing barrier shows as a wrong
// number or as a difference between the two orders. With AddressSanitizer (`make soak`) so is an access beyond the memory
// that a tensor has or shares. Not seen: additions that should be atomic, a kernel that does not wait for the one before, static shared
// memory that nobody has written, masks of shuffles.
// cuda_on_cpu.py replaces assembly with calls of the functions `ptx_...` below.

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__ static
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint3 { unsigned x, y, z; };

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

template <class A, class B, class T = std::common_type_t<A, B>> T min(A a, B b) { return T(a) < T(b) ? T(a) : T(b); }
template <class A, class B, class T = std::common_type_t<A, B>> T max(A a, B b) { return T(a) < T(b) ? T(b) : T(a); }

template <class To, class From> To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

inline float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
inline float __int_as_float(int bits) { return same_bits<float>(bits); }
inline int __float_as_int(float value) { return same_bits<int>(value); }
inline float __fmul_rn(float a, float b) { volatile float product = a * b; return product; }
inline int __float2int_rn(float value) { return lrintf(value); }
inline float rsqrtf(float value) { return 1 / sqrtf(value); }

// ------------------------------------------------------------------------------------------------- threads and blocks

namespace emulated {

constexpr unsigned WARP = 32, MOST_THREADS = 1024;
constexpr size_t STACK = 128 * 1024, MOST_SHARED = 256 * 1024, GUARD = 64 * 1024;

enum State { READY, AT_WARP_BARRIER, AT_BLOCK_BARRIER, ENDED };

struct Copy { char *to; const char *from; unsigned bytes; };

struct Thread {
  unsigned number;
  State state;
  const char *place;  // where it waits
  bool has_begun;
  ucontext_t beginning;
  jmp_buf here;
  uint64_t shown[2][8];  // to its warp, at this meeting and at the one before
  unsigned meetings;
  std::vector<std::vector<Copy>> copies;  // groups; the last one is open
};

static Thread threads[MOST_THREADS], *self;
static unsigned num_threads;
static bool backwards;
static char *stacks, *shared_end, *shared_begin;
static uint3 block, blocks;
static std::function<void()> body;
static jmp_buf scheduler;
static char error[200];

[[noreturn]] inline void fail(const char *what) {
  snprintf(error, sizeof error, "%s (block %u, thread %u)", what, block.x, self->number);
  _longjmp(scheduler, 1);
}

inline void wait(State state, const char *place) {
  self->state = state, self->place = place;
  if (!_setjmp(self->here)) _longjmp(scheduler, 1);
}

// Shows words to the warp; `shown_by` then reads those of a lane.
template <class T>
void meet(const char *place, const T *words, unsigned count) {
  uint64_t *shown = self->shown[++self->meetings % 2];
  for (unsigned i = 0; i < count; i++) memcpy(shown + i, words + i, sizeof(T));
  wait(AT_WARP_BARRIER, place);
}

template <class T>
T shown_by(unsigned lane, unsigned word = 0) {
  T value;
  memcpy(&value, threads[self->number / WARP * WARP + lane].shown[self->meetings % 2] + word, sizeof value);
  return value;
}

inline unsigned turn(unsigned i, unsigned count) { return backwards ? count - 1 - i : i; }

inline void run(Thread &thread) {
  self = &thread;
  if (_setjmp(scheduler)) return;
  if (self->has_begun) _longjmp(self->here, 1);
  self->has_begun = true;
  setcontext(&self->beginning);
}

inline void begin() {
  body();
  self->state = ENDED;
  _longjmp(scheduler, 1);
}

// Until all lanes wait for the block or have ended.
inline void run_warp(Thread *lanes) {
  for (;;) {
    for (unsigned i = 0; i < WARP && !*error; i++)
      if (lanes[turn(i, WARP)].state == READY) run(lanes[turn(i, WARP)]);
    unsigned met = 0;
    for (unsigned i = 0; i < WARP; i++) met += lanes[i].state == AT_WARP_BARRIER && lanes[i].place == lanes[0].place;
    for (unsigned i = 0; i < WARP && met < WARP; i++)
      if (lanes[i].state == AT_WARP_BARRIER && !*error)
        snprintf(error, sizeof error, "lanes of warp %u miss %s", lanes->number / WARP, lanes[i].place);
    if (met < WARP || *error) return;
    for (unsigned i = 0; i < WARP; i++) lanes[i].state = READY;
  }
}

inline void run_block() {
  memset(shared_begin, 0xff, shared_end - shared_begin);
  for (unsigned i = 0; i < num_threads; i++) {
    Thread &thread = threads[i];
    thread.number = i, thread.state = READY, thread.has_begun = false, thread.meetings = 0;
    thread.copies.assign(1, {});
    getcontext(&thread.beginning);
    thread.beginning.uc_stack.ss_sp = stacks + i * STACK;
    thread.beginning.uc_stack.ss_size = STACK;
    makecontext(&thread.beginning, begin, 0);
  }
  const unsigned warps = num_threads / WARP;
  for (bool goes_on = true; goes_on && !*error;) {
    for (unsigned i = 0; i < warps && !*error; i++) run_warp(threads + turn(i, warps) * WARP);
    goes_on = false;
    for (unsigned i = 0; i < num_threads; i++)
      if (threads[i].state == AT_BLOCK_BARRIER) threads[i].state = READY, goes_on = true;
  }
}

inline char *memory(size_t bytes, size_t guarded) {
  void *found = mmap(nullptr, bytes + guarded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (guarded) mprotect(static_cast<char *>(found) + bytes, guarded, PROT_NONE);
  return static_cast<char *>(found);
}

template <class... P, size_t... I>
std::function<void()> bound(void (*kernel)(P...), void **arguments, std::index_sequence<I...>) {
  return [=] { kernel(*static_cast<std::decay_t<P> *>(arguments[I])...); };
}

// What was wrong, or an empty text.
template <class... P>
const char *launch(void (*kernel)(P...), const unsigned *grid, unsigned size, unsigned shared, bool in_reverse,
                   void **arguments, const size_t *sizes, unsigned count) {
  const size_t wanted[] = {sizeof(std::decay_t<P>)...};
  if (count != sizeof...(P)) return "another number of arguments";
  for (unsigned i = 0; i < count; i++)
    if (sizes[i] != wanted[i]) return "an argument of another size";
  if (size % WARP || size > MOST_THREADS || shared > MOST_SHARED) return "too many threads or too much memory";
  if (!stacks) {
    stacks = memory(STACK * MOST_THREADS, 0);
    shared_end = memory(MOST_SHARED, GUARD) + MOST_SHARED;
  }
  shared_begin = shared_end - (shared + 15) / 16 * 16;
  num_threads = size, backwards = in_reverse, *error = 0;
  body = bound(kernel, arguments, std::index_sequence_for<P...>());
  blocks = {grid[0], grid[1], grid[2]};
  for (unsigned i = 0; i < grid[0] * grid[1] * grid[2] && !*error; i++) {
    const unsigned number = turn(i, grid[0] * grid[1] * grid[2]);
    block = {number % grid[0], number / grid[0] % grid[1], number / grid[0] / grid[1]};
    run_block();
  }
  return error;
}

}  // namespace emulated

#define threadIdx (uint3{emulated::self->number, 0, 0})
#define blockIdx (emulated::block)
#define gridDim (emulated::blocks)
#define blockDim (uint3{emulated::num_threads, 1, 1})
#define LAUNCH(NAME)                                                                                            \
  extern "C" const char *launch_##NAME(const unsigned *grid, unsigned size, unsigned shared, bool in_reverse,   \
                                       void **arguments, const size_t *sizes, unsigned count) {                 \
    return emulated::launch(NAME, grid, size, shared, in_reverse, arguments, sizes, count);                     \
  }

// ------------------------------------------------------------------------------------- what threads and warps can do

inline void __syncthreads() { emulated::wait(emulated::AT_BLOCK_BARRIER, "__syncthreads"); }
inline void __syncwarp() { emulated::wait(emulated::AT_WARP_BARRIER, "__syncwarp"); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  emulated::meet("__shfl_xor_sync", &value, 1);
  return emulated::shown_by<T>((emulated::self->number % emulated::WARP) ^ distance);
}

template <class T, class Choose>
T reduced(const char *place, T value, Choose choose) {
  emulated::meet(place, &value, 1);
  for (unsigned lane = 0; lane < emulated::WARP; lane++) value = choose(value, emulated::shown_by<T>(lane));
  return value;
}

template <class T> T __reduce_min_sync(unsigned, T value) { return reduced("__reduce_min_sync", value, min<T, T>); }
template <class T> T __reduce_max_sync(unsigned, T value) { return reduced("__reduce_max_sync", value, max<T, T>); }

template <class T>
T atomicAdd(T *place, T value) {
  const T before = *place;
  *place += value;
  return before;
}

inline size_t __cvta_generic_to_shared(const void *place) {
  const size_t address = static_cast<const char *>(place) - emulated::shared_begin;
  if (address > size_t(emulated::shared_end - emulated::shared_begin)) emulated::fail("no place in shared memory");
  return address;
}

inline char *in_shared(unsigned address) {  // 16 bytes
  if (address % 16) emulated::fail("an address that is no multiple of 16");
  if (address + 16 > emulated::shared_end - emulated::shared_begin) emulated::fail("beyond the shared memory");
  return emulated::shared_begin + address;
}

inline void make(const emulated::Copy &copy) {
  memset(copy.to, 0, 16);
  memcpy(copy.to, copy.from, copy.bytes);
}

inline void ptx_cp_async_cg_shared_global(unsigned to, const void *from, unsigned bytes = 16) {
  if (bytes && reinterpret_cast<size_t>(from) % 16) emulated::fail("an address that is no multiple of 16");
  const emulated::Copy copy = {in_shared(to), static_cast<const char *>(from), bytes};
  if (emulated::backwards) make(copy);
  else emulated::self->copies.back().push_back(copy);
}

inline void ptx_cp_async_commit_group() { emulated::self->copies.push_back({}); }

inline void finish_copies(size_t left) {  // groups
  auto &groups = emulated::self->copies;
  for (size_t i = 0; i + left < groups.size(); i++) {
    for (const emulated::Copy &copy : groups[i]) make(copy);
    groups[i].clear();
  }
}

inline void ptx_cp_async_wait_all() { finish_copies(0); }
inline void ptx_cp_async_wait_group(int left) { finish_copies(left + 1); }

inline uint16_t bfloat16(float value) {  // rounded to the nearest, of two to the even one
  const unsigned bits = same_bits<unsigned>(value);
  return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline void ptx_cvt_rn_bf16x2_f32(unsigned &pair, float upper, float lower) {
  pair = bfloat16(upper) << 16 | bfloat16(lower);
}

inline void load_matrices(unsigned *const *results, unsigned address, bool transposed) {
  const unsigned lane = emulated::self->number % emulated::WARP;
  emulated::meet(transposed ? "ldmatrix.trans" : "ldmatrix", &address, 1);
  for (unsigned matrix = 0; matrix < 4; matrix++) {
    uint16_t numbers[2];
    for (unsigned i = 0; i < 2; i++) {
      const unsigned row = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
      memcpy(numbers + i, in_shared(emulated::shown_by<unsigned>(matrix * 8 + row)) + column * 2, 2);
    }
    *results[matrix] = numbers[1] << 16 | numbers[0];
  }
}

inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned &r0, unsigned &r1, unsigned &r2, unsigned &r3,
                                                         unsigned address) {
  unsigned *const results[] = {&r0, &r1, &r2, &r3};
  load_matrices(results, address, false);
}

inline void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned &r0, unsigned &r1, unsigned &r2, unsigned &r3,
                                                               unsigned address) {
  unsigned *const results[] = {&r0, &r1, &r2, &r3};
  load_matrices(results, address, true);
}

// Sum += A B: A has 16 rows and 16 columns, B 8 columns. A lane has two numbers of A in each of four words, which are
// the quarters of A, two of B in each of two words, the upper and the lower rows, and four of the sum.
inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float &s0, float &s1, float &s2, float &s3,
                                                                    unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                                    unsigned b0, unsigned b1) {
  const unsigned words[] = {a0, a1, a2, a3, b0, b1}, lane = emulated::self->number % emulated::WARP;
  emulated::meet("mma", words, 6);
  auto number = [](unsigned lane, unsigned word, unsigned upper) {
    const unsigned pair = emulated::shown_by<unsigned>(lane, word);
    return same_bits<float>(upper ? pair & 0xffff0000 : pair << 16);
  };
  float *const sums[] = {&s0, &s1, &s2, &s3};
  for (unsigned i = 0; i < 4; i++) {
    const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (unsigned k = 0; k < 16; k++) {
      const float a = number(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k % 2);
      *sums[i] += a * number(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
    }
  }
}
