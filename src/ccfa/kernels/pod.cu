// POD-spatial: the distance of two networks' maps, forward and backward, each in one kernel for all levels.
//
// Maps are (image, row, column, channel) in bfloat16. `compare` has a block for each image and level. It copies both
// maps into shared memory, adds up the squares of each row and of each column, and compares the two vectors of sums.
// The gradient of a pixel is its value times a number of its row and one of its column: `compare` stores those, and
// `gradients` multiplies, so that maps of gradients are written once and rounded once.
//
// Every sum has a fixed order: results are bit-identical from run to run. The distance of equal maps is exactly 0: both
// go through the same operations, and `__fmul_rn` keeps the compiler from fusing one map's product with the difference.

typedef unsigned int u32;

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr u32 ALL = 0xffffffff;     // lanes
constexpr float SMALLEST = 1e-24f;  // squared length: the eps of torch's normalize, squared

struct alignas(16) Eight { float at[8]; };  // channels, as they stand in 16 bytes of bfloat16

struct Level {  // pointers to the first image
  const uint4 *previous, *current;
  float *slopes;  // twice the gradient with respect to each sum (rows, then columns; channels)
  uint4 *gradient;
  int height, width, octets, is_copied;  // octets of channels; whether both maps fit into shared memory
};

struct Levels { Level at[8]; };

// A float2 for each warp, twice; the sums of squares of both maps; their copies.
extern __shared__ __align__(16) char shared[];

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ Eight unpacked(uint4 octet) {
  return {low(octet.x), high(octet.x), low(octet.y), high(octet.y),
          low(octet.z), high(octet.z), low(octet.w), high(octet.w)};
}

__device__ __forceinline__ u32 pair_of(float first, float second) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

__device__ __forceinline__ void copy_ahead(uint4 *to, const uint4 *from) {
  const u32 address = static_cast<u32>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from));
}

__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The sums over all threads, in a fixed order; every thread gets them.
__device__ __forceinline__ float2 sum_over_block(float first, float second, float2 *of_warps) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) {
    first += __shfl_xor_sync(ALL, first, distance);
    second += __shfl_xor_sync(ALL, second, distance);
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = make_float2(first, second);
  __syncthreads();
  float2 sum = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < WARPS; warp++) sum.x += of_warps[warp].x, sum.y += of_warps[warp].y;
  return sum;
}

// The sums of squares of each row and of each column of both maps, eight channels at a time.
__device__ __forceinline__ void pool(const uint4 *previous, const uint4 *current, const Level &level, Eight *sums) {
  const int height = level.height, width = level.width, octets = level.octets;
  const int in_rows = height * octets, num = in_rows + width * octets;
  for (int i = threadIdx.x; i < 2 * num; i += THREADS) {
    const int strip = i < num ? i : i - num;
    const bool is_row = strip < in_rows;
    const int row = strip / octets;
    const uint4 *const map = (i < num ? previous : current) +
                             (is_row ? row * width * octets + strip % octets : strip - in_rows);
    const int step = is_row ? octets : width * octets, end = step * (is_row ? width : height);
    int place = is_row ? row % width * step : 0;  // neighbouring rows start apart, such that no banks conflict
    Eight sum = {};
#pragma unroll 4
    for (int left = is_row ? width : height; left; left--) {
      const Eight value = unpacked(map[place]);
#pragma unroll
      for (int c = 0; c < 8; c++) sum.at[c] = fmaf(value.at[c], value.at[c], sum.at[c]);
      place = place + step == end ? 0 : place + step;
    }
    sums[i] = sum;
  }
}

// The distance of each image at each level; `share` is the part of one of them in the loss.
extern "C" __global__ void __launch_bounds__(THREADS) compare(
    const __grid_constant__ Levels levels, float share, float *__restrict__ distances) {
  const Level &level = levels.at[blockIdx.y];
  const int size = level.height * level.width * level.octets;  // of a map, in octets
  const int num = (level.height + level.width) * level.octets * 8;
  const uint4 *const previous = level.previous + size_t(blockIdx.x) * size;
  const uint4 *const current = level.current + size_t(blockIdx.x) * size;
  float2 *const of_warps = reinterpret_cast<float2 *>(shared);
  float *const old_sums = reinterpret_cast<float *>(of_warps + 2 * WARPS), *const new_sums = old_sums + num;

  if (level.is_copied) {
    uint4 *const copies = reinterpret_cast<uint4 *>(new_sums + num);
    for (int i = threadIdx.x; i < size; i += THREADS) {
      copy_ahead(copies + i, previous + i);
      copy_ahead(copies + size + i, current + i);
    }
    copies_done();
    __syncthreads();
    pool(copies, copies + size, level, reinterpret_cast<Eight *>(old_sums));
  } else {
    pool(previous, current, level, reinterpret_cast<Eight *>(old_sums));
  }
  __syncthreads();

  float of_old = 0.f, of_new = 0.f;
#pragma unroll 4
  for (int i = threadIdx.x; i < num; i += THREADS) {
    of_old = fmaf(old_sums[i], old_sums[i], of_old);
    of_new = fmaf(new_sums[i], new_sums[i], of_new);
  }
  const float2 squares = sum_over_block(of_old, of_new, of_warps);
  const float by_old = rsqrtf(fmaxf(squares.x, SMALLEST)), by_new = rsqrtf(fmaxf(squares.y, SMALLEST));

  float apart = 0.f, along = 0.f;
#pragma unroll 4
  for (int i = threadIdx.x; i < num; i += THREADS) {
    const float unit = __fmul_rn(new_sums[i], by_new), difference = __fmul_rn(old_sums[i], by_old) - unit;
    apart = fmaf(difference, difference, apart);
    along = fmaf(difference, unit, along);
  }
  const float2 found = sum_over_block(apart, along, of_warps + WARPS);
  const float distance = found.x > 0.f ? sqrtf(found.x) : 0.f;
  const float factor = found.x > 0.f ? 2.f * share * by_new / distance : 0.f;
  const float projection = squares.y < SMALLEST ? 0.f : found.y;  // a shorter vector's length is a constant
  if (threadIdx.x == 0) distances[blockIdx.y * gridDim.x + blockIdx.x] = distance;
  float *const slopes = level.slopes + size_t(blockIdx.x) * num;
#pragma unroll 4
  for (int i = threadIdx.x; i < num; i += THREADS) {
    const float unit = __fmul_rn(new_sums[i], by_new), difference = __fmul_rn(old_sums[i], by_old) - unit;
    slopes[i] = factor * (projection * unit - difference);
  }
}

// The loss's gradients with respect to the current maps; `scale` is the gradient with respect to the loss.
extern "C" __global__ void __launch_bounds__(THREADS) gradients(
    const __grid_constant__ Levels levels, const float *__restrict__ scale) {
  const Level &level = levels.at[blockIdx.y];
  const int height = level.height, octets = level.octets, line = level.width * octets;
  const size_t first = size_t(blockIdx.x) * height * line;
  const uint4 *const map = level.current + first;
  uint4 *const result = level.gradient + first;
  const Eight *const of_rows =
      reinterpret_cast<const Eight *>(level.slopes) + size_t(blockIdx.x) * (height * octets + line);
  // A thread has the same places of every row or, of short rows, of every `groups`-th one; several blocks take turns.
  const int groups = max(1, THREADS / line), group = threadIdx.x / line;
  if (group >= groups) return;
  const float factor = *scale;
  for (int i = threadIdx.x - group * line; i < line; i += THREADS) {
    const Eight of_column = of_rows[height * octets + i];
    const int octet = i % octets;
    for (int row = blockIdx.z * groups + group; row < height; row += gridDim.z * groups) {
      const Eight of_row = of_rows[row * octets + octet], value = unpacked(map[row * line + i]);
      Eight v;
#pragma unroll
      for (int c = 0; c < 8; c++) v.at[c] = value.at[c] * (factor * (of_row.at[c] + of_column.at[c]));
      result[row * line + i] = make_uint4(pair_of(v.at[0], v.at[1]), pair_of(v.at[2], v.at[3]),
                                          pair_of(v.at[4], v.at[5]), pair_of(v.at[6], v.at[7]));
    }
  }
}
