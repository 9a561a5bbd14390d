// A narrow ResNet's training step as one kernel per convolution, and its evaluation as one kernel.
//
// Maps are (image, row, column, channel) in bfloat16. A block works on one image: it loads the map that the convolution
// reads into shared memory, with a border of zeros, and multiplies it with the weights on tensor cores. What surrounds
// a convolution happens while its input is loaded or its result is stored, so that no map is read only for that:
//
//   forward   load: batch norm of the previous convolution's result, shortcut, ReLU; store: sums for the next batch norm
//   backward  load: batch norm's gradient; store: shortcut's gradient, ReLU's mask, sums for the next batch norm
//
// Sums over the batch are added up as whole numbers, by atomic additions: nothing depends on the order in which blocks
// run, so that the same step gives the same bits. A kernel may start before the one before it has ended, on the GPUs
// that can do this; it reads nothing of it before `wait_for_others`.

typedef unsigned int u32;
typedef unsigned short bf16;  // never used for arithmetic

constexpr int THREADS = 256, WARPS = THREADS / 32;

extern __shared__ __align__(16) char shared[];

// ---------------------------------------------------------------------------------------------------------- numbers

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 pair_of(float first, float second) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

struct Eight { float at[8]; };  // channels, as they stand in 16 bytes

__device__ __forceinline__ Eight unpacked(uint4 octet) {
  return {low(octet.x), high(octet.x), low(octet.y), high(octet.y),
          low(octet.z), high(octet.z), low(octet.w), high(octet.w)};
}

__device__ __forceinline__ uint4 packed(const Eight &v) {
  return make_uint4(pair_of(v.at[0], v.at[1]), pair_of(v.at[2], v.at[3]), pair_of(v.at[4], v.at[5]),
                    pair_of(v.at[6], v.at[7]));
}

struct Four { float at[4]; };

__device__ __forceinline__ Four four(const bf16 *place) {
  uint2 quad = *reinterpret_cast<const uint2 *>(place);
  return {low(quad.x), high(quad.x), low(quad.y), high(quad.y)};
}

__device__ __forceinline__ void store(bf16 *place, const Four &v) {
  *reinterpret_cast<uint2 *>(place) = make_uint2(pair_of(v.at[0], v.at[1]), pair_of(v.at[2], v.at[3]));
}

// ----------------------------------------------------------------------------------------------------- tensor cores

__device__ __forceinline__ u32 shared_address(const void *place) {
  return static_cast<u32>(__cvta_generic_to_shared(place));
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void copy_ahead(char *to, const char *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
}

// The same, or 16 bytes of zeros where there is nothing to copy.
__device__ __forceinline__ void copy_ahead(char *to, const char *from, bool exists) {
  const u32 bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes));
}

__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;"); }
__device__ __forceinline__ void end_of_group() { asm volatile("cp.async.commit_group;"); }

template <int NUM>
__device__ __forceinline__ void all_but_groups_done() {
  asm volatile("cp.async.wait_group %0;" ::"n"(NUM));
}

__device__ __forceinline__ void wait_for_others() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");  // only now, so that whatever came before this kernel has ended
#endif
}

// A convolution of one image. COUT is a multiple of 16; the result has SIDE x SIDE pixels, in tiles of 16: a tile is two
// rows, a row or half a row. A warp computes 16 channels of tiles that lie below each other, so that a row of the map
// that it loads serves the three rows of results which read it. Where there are few pixels, two warps compute the same
// tiles from half of the channels each, and each gets the sum of half of these tiles. A thread has rows `lane / 4` and
// `lane / 4 + 8` of a tile, and of each the four channels from 4 * (lane % 4) on: the columns of the weights are stored
// in an order that makes it so.
template <int CIN_, int COUT_, int SIDE_, int STRIDE_>
struct Convolution {
  static constexpr int CIN = CIN_, COUT = COUT_, SIDE = SIDE_, STRIDE = STRIDE_;
  static constexpr int FROM = SIDE * STRIDE, WIDTH = FROM + 2;  // of the map that is read, and with its border
  static constexpr int PITCH = 2 * CIN + 16;                    // bytes of a pixel, such that no banks conflict
  static constexpr int MAP_BYTES = WIDTH * WIDTH * PITCH, WEIGHT_BYTES = 9 * CIN * COUT * 2;
  static constexpr int ACROSS = SIDE < 16 ? SIDE : 16, STRIPS = SIDE / ACROSS;  // columns of a tile; tiles side by side
  static constexpr int DOWN = 16 / ACROSS * STRIDE;  // rows of the map from one tile to the tile below
  static constexpr int WARPS_N = COUT / 16, SHARES = SIDE < 16 ? 2 : 1;
  static constexpr int PARTS = WARPS / WARPS_N;  // warps that have the same channels
  static constexpr int COMPUTED = SIDE * SIDE / 16 * SHARES / PARTS, TILES = COMPUTED / SHARES;
  static constexpr int STEPS = CIN / 16;  // of 16 channels for each of the 9 taps

  float sums[COMPUTED][2][4];

  __device__ __forceinline__ static int part() { return threadIdx.x / 32 / WARPS_N; }
  __device__ __forceinline__ static int share() { return SHARES == 1 ? 0 : part() / (PARTS / SHARES); }
  __device__ __forceinline__ static int strip() { return part() % STRIPS; }
  __device__ __forceinline__ static int first_tile() { return part() % (PARTS / SHARES) / STRIPS * COMPUTED; }  // of a strip
  __device__ __forceinline__ static int channel() { return threadIdx.x / 32 % WARPS_N * 16 + threadIdx.x % 4 * 4; }
  __device__ __forceinline__ static int pixel(int tile, int half) {
    return ((first_tile() + share() * TILES + tile) * STRIPS + strip()) * 16 + threadIdx.x % 32 / 4 + 8 * half;
  }
  __device__ __forceinline__ static char *at(char *map, int row, int column) {
    return map + ((row + 1) * WIDTH + column + 1) * PITCH;
  }
  // Where the first tap of a pixel of the warp's first tile is, (row, column) with the border counted.
  __device__ __forceinline__ static u32 source(const char *map, int pixel) {
    const int row = first_tile() * DOWN + pixel / ACROSS * STRIDE, column = (strip() * 16 + pixel % ACROSS) * STRIDE;
    return shared_address(map) + (row * WIDTH + column) * PITCH;
  }
  __device__ __forceinline__ Four result(int tile, int half) const {
    return {sums[tile][0][2 * half], sums[tile][0][2 * half + 1], sums[tile][1][2 * half],
            sums[tile][1][2 * half + 1]};
  }

  // The weights are lost where warps share tiles.
  __device__ __forceinline__ void run(const char *map, char *weights) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint4 *columns = reinterpret_cast<const uint4 *>(weights) + warp % WARPS_N * 32 + lane;
    const u32 from = source(map, lane % 16) + lane / 16 * 16;
#pragma unroll
    for (int i = 0; i < COMPUTED * 8; i++) sums[i / 8][i / 4 % 2][i % 4] = 0.f;
#pragma unroll 1
    for (int step = share() * (STEPS / SHARES); step < (share() + 1) * (STEPS / SHARES); step++) {
      uint4 b[9];
#pragma unroll
      for (int tap = 0; tap < 9; tap++) b[tap] = columns[(tap * STEPS + step) * WARPS_N * 32];
#pragma unroll
      for (int row = 0; row < (COMPUTED - 1) * DOWN + 3; row++)
#pragma unroll
        for (int right = 0; right < 3; right++) {
          if (row % DOWN > 2) continue;  // no tap reads it
          u32 a[4];
          load_matrices(a, from + (row * WIDTH + right) * PITCH + step * 32);
#pragma unroll
          for (int down = 0; down < 3; down++) {
            const int tile = (row - down) / DOWN;
            if (row < down || (row - down) % DOWN || tile >= COMPUTED) continue;
            multiply_add(sums[tile][0], a, b[down * 3 + right].x, b[down * 3 + right].y);
            multiply_add(sums[tile][1], a, b[down * 3 + right].z, b[down * 3 + right].w);
          }
        }
    }
    if constexpr (SHARES == 2) add_shares(weights);
  }

  // The same for a kernel of 1x1. Where warps share tiles, this overwrites as much as the weights of 3x3 would take.
  __device__ __forceinline__ void run_1x1(const char *map, char *weights) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint4 *columns = reinterpret_cast<const uint4 *>(weights) + warp % WARPS_N * 32 + lane;
    const u32 from = source(map, lane % 16) + (WIDTH + 1) * PITCH + lane / 16 * 16;
#pragma unroll
    for (int i = 0; i < COMPUTED * 8; i++) sums[i / 8][i / 4 % 2][i % 4] = 0.f;
#pragma unroll
    for (int i = 0; i < STEPS / SHARES; i++) {
      const int step = share() * (STEPS / SHARES) + i;
      const uint4 b = columns[step * WARPS_N * 32];
#pragma unroll
      for (int tile = 0; tile < COMPUTED; tile++) {
        u32 a[4];
        load_matrices(a, from + tile * DOWN * WIDTH * PITCH + step * 32);
        multiply_add(sums[tile][0], a, b.x, b.y);
        multiply_add(sums[tile][1], a, b.z, b.w);
      }
    }
    if constexpr (SHARES == 2) add_shares(weights);
  }

  // The first of two warps keeps the first half of the tiles and gives the others, the second one the reverse.
  __device__ __forceinline__ void add_shares(char *room) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, other = warp ^ (WARPS / 2);
    float4 *places = reinterpret_cast<float4 *>(room);  // (warps, 2 * TILES, 32)
    __syncthreads();                                    // no warp reads weights any more
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
      const float *one = sums[i / 2][i % 2], *two = sums[TILES + i / 2][i % 2];
      float4 given;
      given.x = share() ? one[0] : two[0], given.y = share() ? one[1] : two[1];
      given.z = share() ? one[2] : two[2], given.w = share() ? one[3] : two[3];
      places[(warp * 2 * TILES + i) * 32 + lane] = given;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
      const float4 more = places[(other * 2 * TILES + i) * 32 + lane];
      float *one = sums[i / 2][i % 2];
      const float *two = sums[TILES + i / 2][i % 2];
      one[0] = (share() ? two[0] : one[0]) + more.x, one[1] = (share() ? two[1] : one[1]) + more.y;
      one[2] = (share() ? two[2] : one[2]) + more.z, one[3] = (share() ? two[3] : one[3]) + more.w;
    }
  }
};

template <class C, int TAPS = 9>
__device__ __forceinline__ void copy_weights(char *shared, const bf16 *weights) {
  for (int i = threadIdx.x * 16; i < C::WEIGHT_BYTES / 9 * TAPS; i += THREADS * 16)
    copy_ahead(shared + i, reinterpret_cast<const char *>(weights) + i);
}

template <class C>
__device__ __forceinline__ void clear_border(char *map, int threads) {
  constexpr int OCTETS = C::CIN / 8, EDGE = C::WIDTH - 1;
  for (int i = threadIdx.x; i < 4 * EDGE * OCTETS; i += threads) {
    const int place = i / OCTETS % EDGE, side = i / OCTETS / EDGE;
    const int row = side == 0 ? 0 : side == 1 ? EDGE : side == 2 ? place + 1 : place;
    const int column = side == 0 ? place : side == 1 ? place + 1 : side == 2 ? 0 : EDGE;
    *reinterpret_cast<uint4 *>(map + (row * C::WIDTH + column) * C::PITCH + i % OCTETS * 16) = make_uint4(0, 0, 0, 0);
  }
}

// ------------------------------------------------------------------------------------------- batch norm and its sums

struct Norm {
  const float *weight, *bias;  // null where there is no batch norm
  float *running_mean, *running_var;
  long long *batches;  // counts them; null in evaluation mode, where the running moments are used and left as they are
  float *moments;  // (2, C): mean and inverse deviation of the batch, for backward
};

// Sums as whole numbers: of results and their squares, in steps of 2^-20, and of gradients, in steps of 2^-40. Beside
// eps = 1e-5, which is added to the variance, such steps are small. The sum of one image stays within 2^52 steps, so that
// those of a thousand images cannot overflow; a network whose results are that large no longer learns.
typedef unsigned long long u64;
constexpr float RESULT_STEPS = 1048576.f, GRADIENT_STEPS = 1099511627776.f, LIMIT = 4503599627370496.f;  // 2^52

__device__ __forceinline__ float sum_of(const u64 *sum, float steps) {
  return float(static_cast<long long>(*sum)) / steps;
}

// Scale and shift of each channel, (2, C), from its sum and that of its squares; the first block keeps what others need.
// Without a batch norm nothing was convolved, and the map stays as it is.
template <int C>
__device__ __forceinline__ void scale_and_shift(const u64 *sums, const Norm &norm, float count, float eps,
                                                float momentum, float *to) {
  if (threadIdx.x < C) {
    const int c = threadIdx.x;
    if (!norm.weight) {
      to[c] = 1.f, to[C + c] = 0.f;
      if (blockIdx.x == 0) norm.moments[c] = 0.f, norm.moments[C + c] = 1.f;
      return;
    }
    float mean = norm.running_mean[c], variance = norm.running_var[c];
    if (norm.batches) {
      mean = sum_of(sums + c, RESULT_STEPS) / count;
      variance = fmaxf(sum_of(sums + C + c, RESULT_STEPS) / count - mean * mean, 0.f);
    }
    const float inverse = rsqrtf(variance + eps), scale = norm.weight[c] * inverse;
    to[c] = scale;
    to[C + c] = norm.bias[c] - mean * scale;
    if (blockIdx.x == 0) {
      norm.moments[c] = mean;
      norm.moments[C + c] = inverse;
      if (!norm.batches) return;
      norm.running_mean[c] += momentum * (mean - norm.running_mean[c]);
      norm.running_var[c] += momentum * (variance * (count / (count - 1.f)) - norm.running_var[c]);
      if (c == 0) norm.batches[0]++;
    }
  }
}

__device__ __forceinline__ void add(u64 *to, float value, float steps) {
  const float whole = fminf(fmaxf(value * steps, -LIMIT), LIMIT);
  atomicAdd(to, static_cast<u64>(static_cast<long long>(whole)));
}

// Add this image's sums of four channels' values and of their products, from all threads of a convolution.
template <class C>
__device__ __forceinline__ void add_sums(const Four &sum, const Four &product, float *scratch, u64 *to, float steps) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float value = i < 4 ? sum.at[i % 4] : product.at[i % 4];
    value += __shfl_xor_sync(~0u, value, 4);
    value += __shfl_xor_sync(~0u, value, 8);
    value += __shfl_xor_sync(~0u, value, 16);
    if (lane < 4) scratch[(C::part() * 2 + i / 4) * C::COUT + C::channel() + i % 4] = value;
  }
  __syncthreads();
  if (threadIdx.x < 2 * C::COUT) {
    float all = 0.f;
#pragma unroll
    for (int i = 0; i < C::PARTS; i++) all += scratch[i * 2 * C::COUT + threadIdx.x];
    add(to + threadIdx.x, all, steps);
  }
}

// Where the shortcut of a sum comes from, or the gradient of what a shortcut begins with. HALVED: every second pixel,
// with zeros in new channels. SPREAD (gradients only): a map of half the sides, whose pixels are every second pixel's.
enum Shortcut { NONE = 0, SAME = 1, HALVED = 2, SPREAD = 3 };

// ------------------------------------------------------------------------------------------------------------ forward

template <class C>
__device__ __forceinline__ void store_with_sums(const C &convolution, float *scratch, bf16 *result, u64 *result_sums) {
  Four sum = {}, squares = {};
#pragma unroll
  for (int tile = 0; tile < C::TILES; tile++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const Four v = convolution.result(tile, half);
      store(result + (blockIdx.x * C::SIDE * C::SIDE + C::pixel(tile, half)) * C::COUT + C::channel(), v);
#pragma unroll
      for (int i = 0; i < 4; i++) sum.at[i] += v.at[i], squares.at[i] += v.at[i] * v.at[i];
    }
  if (result_sums) add_sums<C>(sum, squares, scratch, result_sums, RESULT_STEPS);
}

template <class C>
__device__ __forceinline__ void forward(const bf16 *__restrict__ y, const u64 *y_sums, const Norm &norm, float eps,
                                        float momentum, const bf16 *__restrict__ shortcut, int kind, int relu,
                                        bf16 *read, const bf16 *weights, bf16 *result, u64 *result_sums) {
  char *map = shared, *own_weights = shared + C::MAP_BYTES;
  float *scratch = reinterpret_cast<float *>(own_weights + C::WEIGHT_BYTES);
  constexpr int OCTETS = C::CIN / 8, PIXELS = C::FROM * C::FROM, LOADS = PIXELS * OCTETS / THREADS;
  const int octet = threadIdx.x % OCTETS, first = threadIdx.x / OCTETS;
  copy_weights<C>(own_weights, weights);
  clear_border<C>(map, THREADS);
  wait_for_others();
  uint4 loaded[LOADS], added[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int pixel = first + i * (THREADS / OCTETS), place = blockIdx.x * PIXELS + pixel;
    loaded[i] = reinterpret_cast<const uint4 *>(y)[place * OCTETS + octet];
    added[i] = make_uint4(0, 0, 0, 0);
    if (kind == SAME) added[i] = reinterpret_cast<const uint4 *>(shortcut)[place * OCTETS + octet];
    if (kind == HALVED && octet < OCTETS / 2) {
      const int row = pixel / C::FROM * 2, column = pixel % C::FROM * 2;
      const int wide = (blockIdx.x * 2 * C::FROM + row) * 2 * C::FROM + column;
      added[i] = reinterpret_cast<const uint4 *>(shortcut)[wide * (OCTETS / 2) + octet];
    }
  }
  scale_and_shift<C::CIN>(y_sums, norm, float(gridDim.x) * PIXELS, eps, momentum, scratch);
  __syncthreads();
  float scale[8], shift[8];
#pragma unroll
  for (int i = 0; i < 8; i++) scale[i] = scratch[octet * 8 + i], shift[i] = scratch[C::CIN + octet * 8 + i];
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int pixel = first + i * (THREADS / OCTETS);
    Eight v = unpacked(loaded[i]), more = unpacked(added[i]);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      v.at[k] = scale[k] * v.at[k] + shift[k] + more.at[k];
      if (relu) v.at[k] = fmaxf(v.at[k], 0.f);
    }
    const uint4 value = packed(v);
    *reinterpret_cast<uint4 *>(C::at(map, pixel / C::FROM, pixel % C::FROM) + octet * 16) = value;
    reinterpret_cast<uint4 *>(read)[(blockIdx.x * PIXELS + pixel) * OCTETS + octet] = value;
  }
  copies_done();
  __syncthreads();
  C convolution;
  convolution.run(map, own_weights);
  store_with_sums(convolution, scratch, result, result_sums);
}

#define FORWARD(NAME, CIN, COUT, SIDE, STRIDE)                                                                       \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                           \
      NAME(const bf16 *y, const u64 *y_sums, Norm norm, float eps, float momentum, const bf16 *shortcut, int kind,   \
           int relu, bf16 *read, const bf16 *weights, bf16 *result, u64 *result_sums) {                              \
    forward<Convolution<CIN, COUT, SIDE, STRIDE>>(y, y_sums, norm, eps, momentum, shortcut, kind, relu, read,        \
                                                  weights, result, result_sums);                                     \
  }
FORWARD(forward_16, 16, 16, 32, 1)
FORWARD(forward_16_32, 16, 32, 16, 2)
FORWARD(forward_32, 32, 32, 16, 1)
FORWARD(forward_32_64, 32, 64, 8, 2)
FORWARD(forward_64, 64, 64, 8, 1)

// An image, (channels, 32, 32) in float32 with these strides, as a map of 16 channels of which the last are 0.
template <class C>
__device__ __forceinline__ void load_image(char *map, const float *images, int image, int channels, int by_channel,
                                           int by_pixel, int threads) {
  for (int pixel = threadIdx.x; pixel < C::FROM * C::FROM; pixel += threads) {
    Eight v = {};
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (k < channels)
        v.at[k] = images[image * channels * C::FROM * C::FROM + k * by_channel + pixel * by_pixel];
    uint4 *place = reinterpret_cast<uint4 *>(C::at(map, pixel / C::FROM, pixel % C::FROM));
    place[0] = packed(v);
    place[1] = make_uint4(0, 0, 0, 0);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    forward_stem(const float *images, int channels, int by_channel, int by_pixel, const bf16 *weights, bf16 *result,
                 u64 *result_sums) {
  using C = Convolution<16, 16, 32, 1>;
  char *own_weights = shared + C::MAP_BYTES;
  clear_border<C>(shared, THREADS);
  wait_for_others();
  copy_weights<C>(own_weights, weights);
  load_image<C>(shared, images, blockIdx.x, channels, by_channel, by_pixel, THREADS);
  copies_done();
  __syncthreads();
  C convolution;
  convolution.run(shared, own_weights);
  store_with_sums(convolution, reinterpret_cast<float *>(own_weights + C::WEIGHT_BYTES), result, result_sums);
}

// A shortcut with parameters: a convolution of 1x1 of every second pixel, then a batch norm.
template <class C>
__device__ __forceinline__ void project(const bf16 *read, const bf16 *weights, bf16 *result, u64 *result_sums) {
  char *own_weights = shared + C::MAP_BYTES;
  constexpr int OCTETS = C::CIN / 8;
  copy_weights<C, 1>(own_weights, weights);
  wait_for_others();
  for (int i = threadIdx.x; i < C::SIDE * C::SIDE * OCTETS; i += THREADS) {
    const int row = i / OCTETS / C::SIDE * C::STRIDE, column = i / OCTETS % C::SIDE * C::STRIDE, octet = i % OCTETS;
    const bf16 *from = read + ((blockIdx.x * C::FROM + row) * C::FROM + column) * C::CIN + octet * 8;
    copy_ahead(C::at(shared, row, column) + octet * 16, reinterpret_cast<const char *>(from));
  }
  copies_done();
  __syncthreads();
  C convolution;
  convolution.run_1x1(shared, own_weights);
  store_with_sums(convolution, reinterpret_cast<float *>(own_weights + C::WEIGHT_BYTES), result, result_sums);
}

template <int C, int SIDE>
__device__ __forceinline__ void normalise(const bf16 *y, const u64 *y_sums, const Norm &norm, float eps, float momentum,
                                          bf16 *result) {
  constexpr int OCTETS = C / 8, PIXELS = SIDE * SIDE;
  __shared__ float scales[2 * C];
  wait_for_others();
  scale_and_shift<C>(y_sums, norm, float(gridDim.x) * PIXELS, eps, momentum, scales);
  __syncthreads();
  const int octet = threadIdx.x % OCTETS * 8;
#pragma unroll
  for (int pixel = threadIdx.x / OCTETS; pixel < PIXELS; pixel += THREADS / OCTETS) {
    const int place = (blockIdx.x * PIXELS + pixel) * C + octet;
    Eight v = unpacked(*reinterpret_cast<const uint4 *>(y + place));
#pragma unroll
    for (int k = 0; k < 8; k++) v.at[k] = scales[octet + k] * v.at[k] + scales[C + octet + k];
    *reinterpret_cast<uint4 *>(result + place) = packed(v);
  }
}

#define PROJECTION(CIN, COUT, SIDE)                                                                                 \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                          \
      project_##CIN##_##COUT(const bf16 *read, const bf16 *weights, bf16 *result, u64 *result_sums) {               \
    project<Convolution<CIN, COUT, SIDE, 2>>(read, weights, result, result_sums);                                   \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
      normalise_##COUT(const bf16 *y, const u64 *y_sums, Norm norm, float eps, float momentum, bf16 *result) {      \
    normalise<COUT, SIDE>(y, y_sums, norm, eps, momentum, result);                                                  \
  }
PROJECTION(16, 32, 16)
PROJECTION(32, 64, 8)

// The end: the last map and its mean over pixels.
template <int C, int SIDE>
__device__ __forceinline__ void forward_end(const bf16 *y, const u64 *y_sums, const Norm &norm, float eps,
                                            float momentum, const bf16 *shortcut, int kind, int relu, bf16 *trunk,
                                            float *embedding) {
  constexpr int PIXELS = SIDE * SIDE, QUADS = C / 4, GROUPS = THREADS / QUADS;
  __shared__ float scratch[GROUPS * C], scales[2 * C];
  wait_for_others();
  scale_and_shift<C>(y_sums, norm, float(gridDim.x) * PIXELS, eps, momentum, scales);
  __syncthreads();
  const int channel = threadIdx.x % QUADS * 4, group = threadIdx.x / QUADS;
  Four sum = {};
#pragma unroll 4
  for (int pixel = group; pixel < PIXELS; pixel += GROUPS) {
    const int place = (blockIdx.x * PIXELS + pixel) * C + channel;
    const int wide = (blockIdx.x * 2 * SIDE + pixel / SIDE * 2) * 2 * SIDE + pixel % SIDE * 2;
    Four v = four(y + place), more = {};
    if (kind == SAME) more = four(shortcut + place);
    if (kind == HALVED && channel < C / 2) more = four(shortcut + wide * (C / 2) + channel);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v.at[i] = scales[channel + i] * v.at[i] + scales[C + channel + i] + more.at[i];
      if (relu) v.at[i] = fmaxf(v.at[i], 0.f);
      sum.at[i] += v.at[i];
    }
    store(trunk + place, v);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) scratch[group * C + channel + i] = sum.at[i];
  __syncthreads();
  if (threadIdx.x < C) {
    float all = 0.f;
    for (int i = 0; i < GROUPS; i++) all += scratch[i * C + threadIdx.x];
    embedding[blockIdx.x * C + threadIdx.x] = all / PIXELS;
  }
}

#define FORWARD_END(C, SIDE)                                                                          \
  extern "C" __global__ void __launch_bounds__(THREADS)                                               \
      forward_end_##C(const bf16 *y, const u64 *y_sums, Norm norm, float eps, float momentum,         \
                      const bf16 *shortcut, int kind, int relu, bf16 *trunk, float *embedding) {      \
    forward_end<C, SIDE>(y, y_sums, norm, eps, momentum, shortcut, kind, relu, trunk, embedding);     \
  }
FORWARD_END(16, 32)
FORWARD_END(32, 16)
FORWARD_END(64, 8)

// ----------------------------------------------------------------------------------------------------------- backward

// The gradient of a batch norm's input is c0 * gradient + c1 * y + c2 for each channel: the sums are those of the
// gradient and of gradient * normalised y, which are the gradients of bias and weight as well.
struct Coefficients { float c0, c1, c2; };

__device__ __forceinline__ Coefficients coefficients(const u64 *sums, const float *weight, const float *moments,
                                                     float count, int channels, int c) {
  const float mean = moments[c], inverse = moments[channels + c], scale = weight[c] * inverse;
  const float by_y = -scale * inverse * sum_of(sums + channels + c, GRADIENT_STEPS) / count;
  return {scale, by_y, -scale * sum_of(sums + c, GRADIENT_STEPS) / count - by_y * mean};
}

struct Before {  // the batch norm whose result the convolution's input is made of, and its own input
  const bf16 *y;
  const float *weight, *bias, *moments;
};

enum Mask { ALL = 0, BY_NORM = 1, BY_TRUNK = 2 };  // where a ReLU lets the gradient pass: where this is positive

__device__ __forceinline__ void add(Four &v, uint2 quad) {
  v.at[0] += low(quad.x), v.at[1] += high(quad.x), v.at[2] += low(quad.y), v.at[3] += high(quad.y);
}

__device__ __forceinline__ uint2 quad_at(const bf16 *place) { return *reinterpret_cast<const uint2 *>(place); }

// Loads the gradient of a batch norm's result and its input, and makes the gradient of that input: as the map that a
// convolution reads, and in memory. Waits for all copies.
template <class C, bool DILATED>
__device__ __forceinline__ void load_gradient(const bf16 *__restrict__ gradient, const u64 *sums,
                                              const bf16 *__restrict__ y, const float *weight, const float *moments,
                                              bf16 *__restrict__ of_y, float *scratch) {
  char *map = shared;
  constexpr int SIDE = DILATED ? C::FROM / 2 : C::FROM, PIXELS = SIDE * SIDE;
  constexpr int OCTETS = C::CIN / 8, LOADS = PIXELS * OCTETS / THREADS;
  const int octet = threadIdx.x % OCTETS, first = threadIdx.x / OCTETS;
  if (DILATED) {
    for (int i = threadIdx.x * 16; i < C::MAP_BYTES; i += THREADS * 16)
      *reinterpret_cast<uint4 *>(map + i) = make_uint4(0, 0, 0, 0);
  } else {
    clear_border<C>(map, THREADS);
  }
  wait_for_others();
  uint4 given[LOADS], input[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int place = (blockIdx.x * PIXELS + first + i * (THREADS / OCTETS)) * OCTETS + octet;
    given[i] = reinterpret_cast<const uint4 *>(gradient)[place];
    input[i] = reinterpret_cast<const uint4 *>(y)[place];
  }
  if (threadIdx.x < C::CIN) {
    const int c = threadIdx.x;
    const Coefficients own = coefficients(sums, weight, moments, float(gridDim.x) * PIXELS, C::CIN, c);
    scratch[c] = own.c0, scratch[C::CIN + c] = own.c1, scratch[2 * C::CIN + c] = own.c2;
  }
  __syncthreads();
  float c0[8], c1[8], c2[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    c0[i] = scratch[octet * 8 + i];
    c1[i] = scratch[C::CIN + octet * 8 + i];
    c2[i] = scratch[2 * C::CIN + octet * 8 + i];
  }
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int pixel = first + i * (THREADS / OCTETS);
    const Eight from = unpacked(given[i]), value = unpacked(input[i]);
    Eight v;
#pragma unroll
    for (int k = 0; k < 8; k++) v.at[k] = c0[k] * from.at[k] + c1[k] * value.at[k] + c2[k];
    const int row = pixel / SIDE * (DILATED + 1), column = pixel % SIDE * (DILATED + 1);
    const uint4 value_of_y = packed(v);
    *reinterpret_cast<uint4 *>(C::at(map, row, column) + octet * 16) = value_of_y;
    reinterpret_cast<uint4 *>(of_y)[(blockIdx.x * PIXELS + pixel) * OCTETS + octet] = value_of_y;
  }
  copies_done();
  __syncthreads();
}

// C is the convolution from the gradient of the result to that of the input; DILATED for a forward stride of 2.
template <class C, bool DILATED>
__device__ __forceinline__ void backward(const bf16 *__restrict__ gradient, const u64 *sums, const bf16 *__restrict__ y,
                                         const float *weight, const float *moments, bf16 *__restrict__ of_y,
                                         const bf16 *weights, const bf16 *__restrict__ shortcut, int kind,
                                         const bf16 *__restrict__ external,
                                         const bf16 *__restrict__ trunk, int mask, const Before &before,
                                         bf16 *__restrict__ result, u64 *result_sums) {
  char *own_weights = shared + C::MAP_BYTES;
  float *scratch = reinterpret_cast<float *>(own_weights + C::WEIGHT_BYTES);
  copy_weights<C>(own_weights, weights);
  load_gradient<C, DILATED>(gradient, sums, y, weight, moments, of_y, scratch);

  C convolution;
  convolution.run(shared, own_weights);
  const int channel = C::channel();
  float mean[4], inverse[4], scale[4], shift[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    mean[i] = before.moments[channel + i];
    inverse[i] = before.moments[C::COUT + channel + i];
    scale[i] = before.weight[channel + i] * inverse[i];
    shift[i] = before.bias[channel + i] - mean[i] * scale[i];
  }
  Four sum = {}, products = {};
  constexpr int AHEAD = 2;  // divides TILES: tiles whose numbers are asked for together, since each answer takes long
#pragma unroll
  for (int tile = 0; tile < C::TILES; tile += AHEAD) {
    uint2 values[2 * AHEAD], from_shortcut[2 * AHEAD], from_outside[2 * AHEAD], signs[2 * AHEAD];
#pragma unroll
    for (int i = 0; i < 2 * AHEAD; i++) {
      const int pixel = C::pixel(tile + i / 2, i % 2), row = pixel / C::SIDE, column = pixel % C::SIDE;
      const int place = (blockIdx.x * C::SIDE * C::SIDE + pixel) * C::COUT + channel;
      values[i] = quad_at(before.y + place);
      from_shortcut[i] = from_outside[i] = signs[i] = make_uint2(0, 0);
      if (kind == SAME) from_shortcut[i] = quad_at(shortcut + place);
      if (kind >= HALVED && row % 2 == 0 && column % 2 == 0) {
        const int narrow = (blockIdx.x * (C::SIDE / 2) + row / 2) * (C::SIDE / 2) + column / 2;
        from_shortcut[i] = quad_at(shortcut + narrow * (kind == HALVED ? 2 : 1) * C::COUT + channel);
      }
      if (external) from_outside[i] = quad_at(external + place);
      if (mask == BY_TRUNK) signs[i] = quad_at(trunk + place);
    }
#pragma unroll
    for (int i = 0; i < 2 * AHEAD; i++) {
      Four v = convolution.result(tile + i / 2, i % 2), value = {}, sign = {};
      add(v, from_shortcut[i]);
      add(v, from_outside[i]);
      add(value, values[i]);
      add(sign, signs[i]);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (mask == BY_NORM) sign.at[k] = scale[k] * value.at[k] + shift[k];
        if (mask != ALL && !(sign.at[k] > 0.f)) v.at[k] = 0.f;
        sum.at[k] += v.at[k];
        products.at[k] += v.at[k] * (value.at[k] - mean[k]) * inverse[k];
      }
      const int place = (blockIdx.x * C::SIDE * C::SIDE + C::pixel(tile + i / 2, i % 2)) * C::COUT + channel;
      store(result + place, v);
    }
  }
  add_sums<C>(sum, products, scratch, result_sums, GRADIENT_STEPS);
}

#define BACKWARD(NAME, CIN, COUT, SIDE, DILATED)                                                                    \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                          \
      NAME(const bf16 *gradient, const u64 *sums, const bf16 *y, const float *weight, const float *moments,         \
           bf16 *of_y, const bf16 *weights, const bf16 *shortcut, int kind, const bf16 *external,                   \
           const bf16 *trunk, int mask, Before before, bf16 *result, u64 *result_sums) {                            \
    backward<Convolution<CIN, COUT, SIDE, 1>, DILATED>(gradient, sums, y, weight, moments, of_y, weights, shortcut, \
                                                       kind, external, trunk, mask, before, result, result_sums);   \
  }
BACKWARD(backward_16, 16, 16, 32, false)
BACKWARD(backward_32_16, 32, 16, 32, true)
BACKWARD(backward_32, 32, 32, 16, false)
BACKWARD(backward_64_32, 64, 32, 16, true)
BACKWARD(backward_64, 64, 64, 8, false)

// Add this image's sums of gradients and of products, from threads that have four channels each, of some of the pixels.
template <int C>
__device__ __forceinline__ void add_gradient_sums(const Four &sum, const Four &products, u64 *result_sums) {
  constexpr int QUADS = C / 4, GROUPS = THREADS / QUADS;
  __shared__ float scratch[2][GROUPS][C];
  const int channel = threadIdx.x % QUADS * 4, group = threadIdx.x / QUADS;
#pragma unroll
  for (int i = 0; i < 4; i++) scratch[0][group][channel + i] = sum.at[i], scratch[1][group][channel + i] = products.at[i];
  __syncthreads();
  if (threadIdx.x < 2 * C) {
    float all = 0.f;
    for (int i = 0; i < GROUPS; i++) all += scratch[threadIdx.x / C][i][threadIdx.x % C];
    add(result_sums + threadIdx.x, all, GRADIENT_STEPS);
  }
}

// Where backward starts: the gradient of the last map, of which the embedding is the mean.
template <int C, int SIDE>
__device__ __forceinline__ void backward_start(const float *of_embedding, const bf16 *external, const bf16 *trunk,
                                               int mask, const Before &before, bf16 *result, u64 *result_sums) {
  constexpr int PIXELS = SIDE * SIDE, QUADS = C / 4, GROUPS = THREADS / QUADS;
  const int channel = threadIdx.x % QUADS * 4, group = threadIdx.x / QUADS;
  Four sum = {}, products = {};
#pragma unroll 4
  for (int pixel = group; pixel < PIXELS; pixel += GROUPS) {
    const int place = (blockIdx.x * PIXELS + pixel) * C + channel;
    const Four value = four(before.y + place);
    Four v = {}, more = {}, sign = {};
    if (external) more = four(external + place);
    if (mask == BY_TRUNK) sign = four(trunk + place);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v.at[i] = (of_embedding ? of_embedding[blockIdx.x * C + channel + i] / PIXELS : 0.f) + more.at[i];
      if (mask == BY_TRUNK && !(sign.at[i] > 0.f)) v.at[i] = 0.f;
      sum.at[i] += v.at[i];
      products.at[i] += v.at[i] * (value.at[i] - before.moments[channel + i]) * before.moments[C + channel + i];
    }
    store(result + place, v);
  }
  add_gradient_sums<C>(sum, products, result_sums);
}

#define BACKWARD_START(C, SIDE)                                                                               \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                       \
      backward_start_##C(const float *of_embedding, const bf16 *external, const bf16 *trunk, int mask,        \
                         Before before, bf16 *result, u64 *result_sums) {                                     \
    backward_start<C, SIDE>(of_embedding, external, trunk, mask, before, result, result_sums);                \
  }
BACKWARD_START(16, 32)
BACKWARD_START(32, 16)
BACKWARD_START(64, 8)

// Backward through a shortcut with parameters: the sums for its batch norm, and the gradient of every second pixel.
template <int C, int SIDE>
__device__ __forceinline__ void sum_gradients(const bf16 *gradient, const bf16 *y, const float *moments,
                                              u64 *result_sums) {
  constexpr int QUADS = C / 4, PIXELS = SIDE * SIDE;
  wait_for_others();
  const int channel = threadIdx.x % QUADS * 4;
  Four sum = {}, products = {};
#pragma unroll 4
  for (int pixel = threadIdx.x / QUADS; pixel < PIXELS; pixel += THREADS / QUADS) {
    const int place = (blockIdx.x * PIXELS + pixel) * C + channel;
    const Four v = four(gradient + place), value = four(y + place);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sum.at[i] += v.at[i];
      products.at[i] += v.at[i] * (value.at[i] - moments[channel + i]) * moments[C + channel + i];
    }
  }
  add_gradient_sums<C>(sum, products, result_sums);
}

template <class C>
__device__ __forceinline__ void project_back(const bf16 *gradient, const u64 *sums, const bf16 *y, const float *weight,
                                             const float *moments, bf16 *of_y, const bf16 *weights, bf16 *result) {
  char *own_weights = shared + C::MAP_BYTES;
  copy_weights<C, 1>(own_weights, weights);
  load_gradient<C, false>(gradient, sums, y, weight, moments, of_y,
                          reinterpret_cast<float *>(own_weights + C::WEIGHT_BYTES));
  C convolution;
  convolution.run_1x1(shared, own_weights);
#pragma unroll
  for (int tile = 0; tile < C::TILES; tile++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int place = blockIdx.x * C::SIDE * C::SIDE + C::pixel(tile, half);
      store(result + place * C::COUT + C::channel(), convolution.result(tile, half));
    }
}

#define PROJECTION_BACK(CIN, COUT, SIDE)                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
      sum_gradients_##CIN(const bf16 *gradient, const bf16 *y, const float *moments, u64 *result_sums) {              \
    sum_gradients<CIN, SIDE>(gradient, y, moments, result_sums);                                                      \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                            \
      project_back_##CIN##_##COUT(const bf16 *gradient, const u64 *sums, const bf16 *y, const float *weight,          \
                                  const float *moments, bf16 *of_y, const bf16 *weights, bf16 *result) {              \
    project_back<Convolution<CIN, COUT, SIDE, 1>>(gradient, sums, y, weight, moments, of_y, weights, result);         \
  }
PROJECTION_BACK(32, 16, 16)
PROJECTION_BACK(64, 32, 8)

// ---------------------------------------------------------------------------------------------- gradients of weights

// The gradient of (out, 3, 3, in) that some images add, by a block for at most 32 of the channels that were read. A warp
// has 16 of these, 16 of the results' channels and all nine taps. Where there are warps enough, it has a part of the
// pixels, in tiles that lie below each other, so that a row of the map serves the three rows of taps. Images are added
// as a whole or in upper and lower HALVES.
template <int CIN, int COUT, int SIDE, int STRIDE, int HALVES_>
struct WeightGradient {
  static constexpr int HALVES = HALVES_, PART = CIN < 32 ? CIN : 32;  // channels of a block
  using C = Convolution<PART, COUT, SIDE, STRIDE>;
  static constexpr int ROWS = C::FROM / HALVES + 2;                           // of the map, with its border
  static constexpr int PITCH = 2 * COUT + 16, PIXELS = SIDE * SIDE / HALVES;  // of the gradients of results
  static constexpr int MS = COUT / 16, PAIRS = MS * (PART / 16), SPLITS = WARPS / PAIRS, TILES = PIXELS / 16 / SPLITS;
  static constexpr int MAP_BYTES = ROWS * C::WIDTH * C::PITCH, BUFFER = MAP_BYTES + PIXELS * PITCH;

  alignas(16) float sums[9][2][4];

  __device__ __forceinline__ WeightGradient() {
#pragma unroll
    for (int i = 0; i < 72; i++) sums[i / 8][i / 4 % 2][i % 4] = 0.f;
  }

  __device__ __forceinline__ void add(const char *map, const char *gradients) {
    const int lane = threadIdx.x % 32, pair = threadIdx.x / 32 % PAIRS, split = threadIdx.x / 32 / PAIRS;
    const int strip = split % C::STRIPS, first = split / C::STRIPS * TILES;
    const int own = (first * C::STRIPS + strip) * 16 + lane % 8 + lane / 16 * 8;  // pixels that this lane points to
    const int other = lane % 16, top = first * C::DOWN + other / C::ACROSS * STRIDE;
    const u32 of_y = shared_address(gradients) + own * PITCH + (pair % MS * 16 + lane / 8 % 2 * 8) * 2;
    const u32 read = shared_address(map) + pair / MS * 32 + lane / 16 * 16 +
                     (top * C::WIDTH + (strip * 16 + other % C::ACROSS) * STRIDE) * C::PITCH;
    u32 a[TILES][4];
#pragma unroll
    for (int row = 0; row < (TILES - 1) * C::DOWN + 3; row++) {
      if (row % C::DOWN == 0 && row / C::DOWN < TILES)
        load_transposed(a[row / C::DOWN], of_y + row / C::DOWN * C::STRIPS * 16 * PITCH);
#pragma unroll
      for (int right = 0; right < 3; right++) {
        if (row % C::DOWN > 2) continue;  // no tap reads it
        u32 b[4];
        load_transposed(b, read + (row * C::WIDTH + right) * C::PITCH);
#pragma unroll
        for (int down = 0; down < 3; down++) {
          const int tile = (row - down) / C::DOWN;
          if (row < down || (row - down) % C::DOWN || tile >= TILES) continue;
          multiply_add(sums[down * 3 + right][0], a[tile], b[0], b[1]);
          multiply_add(sums[down * 3 + right][1], a[tile], b[2], b[3]);
        }
      }
    }
  }

  // Adds the parts of the pixels and gives `keep` (out, tap, in) with the numbers of this channel and the next.
  template <class Keep>
  __device__ __forceinline__ void finish(Keep keep) {
    const int lane = threadIdx.x % 32, pair = threadIdx.x / 32 % PAIRS, split = threadIdx.x / 32 / PAIRS;
#pragma unroll
    for (int half = SPLITS / 2; half; half /= 2) {  // the same order each time
      float4 *place = reinterpret_cast<float4 *>(shared) + (split % half * PAIRS + pair) * 18 * 32 + lane;
      __syncthreads();
      if (split >= half && split < 2 * half)
#pragma unroll
        for (int i = 0; i < 18; i++) place[i * 32] = *reinterpret_cast<float4 *>(sums[i / 2][i % 2]);
      __syncthreads();
      if (split < half)
#pragma unroll
        for (int i = 0; i < 18; i++) {
          const float4 more = place[i * 32];
          float *to = sums[i / 2][i % 2];
          to[0] += more.x, to[1] += more.y, to[2] += more.z, to[3] += more.w;
        }
    }
    if (split > 0) return;
#pragma unroll
    for (int i = 0; i < 36; i++) {
      const int tap = i / 4, tile = i / 2 % 2, half = i % 2;
      const int out = pair % MS * 16 + lane / 4 + half * 8, in = pair / MS * 16 + tile * 8 + lane % 4 * 2;
      keep(out, tap, in, sums[tap][tile][half * 2], sums[tap][tile][half * 2 + 1]);
    }
  }
};

struct Layer { const bf16 *read, *of_y; };  // what a convolution read, and the gradient of its result
struct Layers { Layer at[10]; };

// parts[split][layer]: what the images of a split add. While one image or half is multiplied, the next ones are loaded
// into other BUFFERS.
template <class G, int CIN, int BUFFERS>
__device__ __forceinline__ void weight_gradients(const Layer &layer, int num, float *parts) {
  using C = typename G::C;
  constexpr int OCTETS = G::PART / 8, OUT_OCTETS = C::COUT / 8;
  static_assert(G::SPLITS / 2 * G::PAIRS * 18 * 32 * 16 <= BUFFERS * G::BUFFER, "finish() adds up in shared memory");
  const int part = blockIdx.z;  // of the channels
  auto load = [&](int unit) {
    char *map = shared + unit % BUFFERS * G::BUFFER, *gradients = map + G::MAP_BYTES;
    const int image = unit / G::HALVES, top = unit % G::HALVES * (G::ROWS - 2) - 1;
    const char *from = reinterpret_cast<const char *>(layer.read + (image * C::FROM * C::FROM * CIN + part * G::PART));
#pragma unroll 4
    for (int i = threadIdx.x; i < G::ROWS * C::FROM * OCTETS; i += THREADS) {
      const int row = i / OCTETS / C::FROM, column = i / OCTETS % C::FROM, octet = i % OCTETS;
      const bool exists = top + row >= 0 && top + row < C::FROM;  // else the border is above or below it
      const int pixel = exists ? (top + row) * C::FROM + column : 0;
      copy_ahead(C::at(map, row - 1, column) + octet * 16, from + pixel * CIN * 2 + octet * 16, exists);
    }
    from = reinterpret_cast<const char *>(layer.of_y + unit * G::PIXELS * C::COUT);
#pragma unroll 4
    for (int i = threadIdx.x; i < G::PIXELS * OUT_OCTETS; i += THREADS)
      copy_ahead(gradients + i / OUT_OCTETS * G::PITCH + i % OUT_OCTETS * 16, from + i * 16);
  };
  for (int i = threadIdx.x; i < BUFFERS * G::ROWS * 2 * OCTETS; i += THREADS) {  // the border left and right
    const int row = i / OCTETS / 2 % G::ROWS, column = i / OCTETS % 2 ? C::FROM : -1;
    char *map = shared + i / OCTETS / 2 / G::ROWS * G::BUFFER;
    *reinterpret_cast<uint4 *>(C::at(map, row - 1, column) + i % OCTETS * 16) = make_uint4(0, 0, 0, 0);
  }
  const int units = num * G::HALVES;
  const int begin = units * blockIdx.x / gridDim.x, end = units * (blockIdx.x + 1) / gridDim.x;
#pragma unroll
  for (int i = 0; i < BUFFERS - 1; i++) {
    if (begin + i < end) load(begin + i);
    end_of_group();
  }
  G sum;
  for (int unit = begin; unit < end; unit++) {
    all_but_groups_done<BUFFERS - 2>();
    __syncthreads();  // all have its copies, and need those of the unit before no longer
    if (unit + BUFFERS - 1 < end) load(unit + BUFFERS - 1);
    end_of_group();
    const char *map = shared + unit % BUFFERS * G::BUFFER;
    sum.add(map, map + G::MAP_BYTES);
  }
  parts += (blockIdx.x * gridDim.y + blockIdx.y) * C::COUT * 9 * CIN + part * G::PART;
  sum.finish([&](int out, int tap, int in, float one, float two) {
    *reinterpret_cast<float2 *>(parts + (out * 9 + tap) * CIN + in) = make_float2(one, two);
  });
}

#define WEIGHTS(NAME, CIN, COUT, SIDE, STRIDE, HALVES, BUFFERS)                                          \
  extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(Layers layers, int num, float *parts) {  \
    using G = WeightGradient<CIN, COUT, SIDE, STRIDE, HALVES>;                                           \
    weight_gradients<G, CIN, BUFFERS>(layers.at[blockIdx.y], num, parts);                                \
  }
WEIGHTS(weights_16, 16, 16, 32, 1, 2, 2)
WEIGHTS(weights_16_32, 16, 32, 16, 2, 2, 2)
WEIGHTS(weights_32, 32, 32, 16, 1, 2, 3)
WEIGHTS(weights_32_64, 32, 64, 8, 2, 1, 3)
WEIGHTS(weights_64, 64, 64, 8, 1, 1, 4)

// The same for the stem, where backward ends: the gradient of its result is computed here.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    weights_stem(const bf16 *gradient, const u64 *sums, const bf16 *y, const float *weight, const float *moments,
                 const float *images, int channels, int by_channel, int by_pixel, int num, float *parts) {
  using G = WeightGradient<16, 16, 32, 1, 1>;
  constexpr int QUADS = 16 / 4;
  char *gradients = shared + G::MAP_BYTES;
  clear_border<G::C>(shared, THREADS);
  wait_for_others();
  const int channel = threadIdx.x % QUADS * 4;
  Coefficients own[4];
#pragma unroll
  for (int i = 0; i < 4; i++) own[i] = coefficients(sums, weight, moments, float(num) * G::PIXELS, 16, channel + i);
  G sum;
  for (int image = num * blockIdx.x / gridDim.x; image < num * (blockIdx.x + 1) / gridDim.x; image++) {
    load_image<G::C>(shared, images, image, channels, by_channel, by_pixel, THREADS);
#pragma unroll 4
    for (int pixel = threadIdx.x / QUADS; pixel < G::PIXELS; pixel += THREADS / QUADS) {
      const int place = (image * G::PIXELS + pixel) * 16 + channel;
      Four v = four(gradient + place), value = four(y + place);
#pragma unroll
      for (int i = 0; i < 4; i++) v.at[i] = own[i].c0 * v.at[i] + own[i].c1 * value.at[i] + own[i].c2;
      store(reinterpret_cast<bf16 *>(gradients + pixel * G::PITCH) + channel, v);
    }
    __syncthreads();
    sum.add(shared, gradients);
    __syncthreads();  // the maps of this image are no longer needed
  }
  sum.finish([&](int out, int tap, int in, float one, float two) {
    float *place = parts + ((blockIdx.x * 16 + out) * 9 + tap) * channels + in;
    if (in < channels) place[0] = one;
    if (in + 1 < channels) place[1] = two;
  });
}

// result = the sum of the parts, each of `size` numbers, in order.
extern "C" __global__ void add_parts(const float *parts, int num, int size, float *result) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= size) return;
  float sum = 0.f;
#pragma unroll 16
  for (int part = 0; part < num; part++) sum += parts[part * size + i];
  result[i] = sum;
}

// ------------------------------------------------------------------------------------------------------------ weights

struct Weights {  // of each convolution: (out, 3, 3, in) or (out, 1, 1, in) in float32, and (out, in) factors, if any
  const float *at[40], *factors[40];
  int in[40], out[40], taps[40];
  int start[40];  // where the convolution begins among all of them, in numbers
};

// The weights in bfloat16, in the order in which the lanes of a warp read them, 8 numbers a lane: for each tap and 16
// channels to sum over, for each 16 channels of the result. `transposed` serves the gradient of the input. An image's
// few channels are followed by zeros, up to 16.
__device__ __forceinline__ void reorder(const float *weight, const float *factors, int in, int out, int taps,
                                        bool transposed, bf16 *to) {
  const int sum_over = transposed ? out : max(in, 16), results = transposed ? in : out;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < taps * sum_over * results / 8; i += gridDim.x * blockDim.x) {
    const int lane = i % 32, group = i / 32 % (results / 16), step = i / 32 / (results / 16);
    const int tap = step / (sum_over / 16), column = lane / 4;
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const int tile = k / 4;
      const int c = group * 16 + column / 2 * 4 + tile * 2 + column % 2;
      const int from = step % (sum_over / 16) * 16 + lane % 4 * 2 + k / 2 % 2 * 8 + k % 2;
      if (transposed)
        v[k] = weight[(from * taps + taps - 1 - tap) * in + c] * (factors ? factors[from * in + c] : 1.f);
      else
        v[k] = from < in ? weight[(c * taps + tap) * in + from] * (factors ? factors[c * in + from] : 1.f) : 0.f;
    }
    reinterpret_cast<uint4 *>(to)[i] =
        make_uint4(pair_of(v[0], v[1]), pair_of(v[2], v[3]), pair_of(v[4], v[5]), pair_of(v[6], v[7]));
  }
}

extern "C" __global__ void reorder_weights(Weights weights, bf16 *result, bf16 *transposed) {
  const int layer = blockIdx.y, in = weights.in[layer], out = weights.out[layer], taps = weights.taps[layer];
  const float *weight = weights.at[layer], *factors = weights.factors[layer];
  reorder(weight, factors, in, out, taps, false, result + weights.start[layer]);
  if (transposed && in >= 16) reorder(weight, factors, in, out, taps, true, transposed + weights.start[layer]);
}

// The gradients of factors, (layer, out, in), from the parts of those of their convolutions, (part, layer, out, 3, 3, in).
extern "C" __global__ void add_parts_of_factors(const float *parts, int num, Weights weights, float *result) {
  const int layer = blockIdx.y, in = weights.in[layer], out = weights.out[layer], taps = weights.taps[layer];
  const int i = blockIdx.x * blockDim.x + threadIdx.x, o = i / in, c = i % in;
  if (o >= out) return;
  float sum = 0.f;
  for (int tap = 0; tap < taps; tap++) {
    const float *part = parts + ((layer * out + o) * 9 + (taps == 1 ? 4 : tap)) * in + c;
    float all = 0.f;
#pragma unroll 16
    for (int p = 0; p < num; p++) all += part[p * gridDim.y * out * 9 * in];
    sum += all * weights.at[layer][(o * taps + tap) * in + c];
  }
  result[(layer * out + o) * in + c] = sum;
}

// --------------------------------------------------------------------------------------------------------- evaluation

struct Norms {  // of each convolution
  const float *weight[40], *bias[40], *mean[40], *variance[40];
  int channels[40], start[40];
};

// Batch norm in evaluation mode as a scale and a shift, (2, C) for each convolution.
extern "C" __global__ void fold_norms(Norms norms, float eps, float *scales) {
  const int layer = blockIdx.x, c = threadIdx.x, channels = norms.channels[layer];
  if (c >= channels) return;
  const float scale = norms.weight[layer][c] * rsqrtf(norms.variance[layer][c] + eps);
  float *to = scales + 2 * norms.start[layer];
  to[c] = scale;
  to[channels + c] = norms.bias[layer][c] - norms.mean[layer][c] * scale;
}

struct Evaluation {
  const bf16 *weights;  // of the next convolution
  const float *scales;
  char *own_weights;
};

// One convolution with the batch norm after it; `keep` gets each pixel's four channels.
template <class C, int TAPS = 9, class Keep>
__device__ __forceinline__ void evaluated(Evaluation &now, const char *map, Keep keep) {
  __syncthreads();  // the map is written, and the weights of the last convolution are no longer needed
  copy_weights<C, TAPS>(now.own_weights, now.weights);
  const int channel = C::channel();
  float scale[4], shift[4];
#pragma unroll
  for (int i = 0; i < 4; i++) scale[i] = now.scales[channel + i], shift[i] = now.scales[C::COUT + channel + i];
  now.weights += C::WEIGHT_BYTES / 2 / 9 * TAPS;
  now.scales += 2 * C::COUT;
  copies_done();
  __syncthreads();
  C convolution;
  if constexpr (TAPS == 1) convolution.run_1x1(map, now.own_weights);
  else convolution.run(map, now.own_weights);
#pragma unroll
  for (int tile = 0; tile < C::TILES; tile++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      Four v = convolution.result(tile, half);
#pragma unroll
      for (int i = 0; i < 4; i++) v.at[i] = scale[i] * v.at[i] + shift[i];
      keep(C::pixel(tile, half), channel, v);
    }
}

__device__ __forceinline__ Four rectified(Four v) {
#pragma unroll
  for (int i = 0; i < 4; i++) v.at[i] = fmaxf(v.at[i], 0.f);
  return v;
}

// A block from the trunk `from` to the trunk `to`, which may be the same place if nothing is halved. What halves may
// project: its shortcut has parameters and is made first, where the trunk will be.
template <int CIN, int COUT, int SIDE, int STRIDE>
__device__ __forceinline__ void evaluated_block(Evaluation &now, char *from, char *hidden, char *to, int relu,
                                                bf16 *result, bool projects = false) {
  using First = Convolution<CIN, COUT, SIDE, STRIDE>;
  using Second = Convolution<COUT, COUT, SIDE, 1>;
  if (STRIDE == 2 && projects)
    evaluated<First, 1>(now, from, [&](int pixel, int channel, const Four &v) {
      store(reinterpret_cast<bf16 *>(Second::at(to, pixel / SIDE, pixel % SIDE)) + channel, v);
    });
  evaluated<First>(now, from, [&](int pixel, int channel, const Four &v) {
    store(reinterpret_cast<bf16 *>(Second::at(hidden, pixel / SIDE, pixel % SIDE)) + channel, rectified(v));
  });
  evaluated<Second>(now, hidden, [&](int pixel, int channel, Four v) {
    const int row = pixel / SIDE, column = pixel % SIDE;
    if (channel < CIN || projects) {
      const char *shortcut = projects ? Second::at(to, row, column) : First::at(from, row * STRIDE, column * STRIDE);
      const Four more = four(reinterpret_cast<const bf16 *>(shortcut) + channel);
#pragma unroll
      for (int i = 0; i < 4; i++) v.at[i] += more.at[i];
    }
    if (relu) v = rectified(v);
    store(reinterpret_cast<bf16 *>(Second::at(to, row, column)) + channel, v);
    if (result) store(result + (blockIdx.x * SIDE * SIDE + pixel) * COUT + channel, v);
  });
}

struct Trunk {  // of each block: whether a ReLU follows the sum, and where the sum is stored, if anywhere
  bf16 *at[20];
  int relu[20];
};

// A whole network in evaluation mode, one image a block, all maps in shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    evaluate(const float *images, int channels, int by_channel, int by_pixel, const bf16 *weights, const float *scales,
             int num_16, int num_32, int num_64, int projects_32, int projects_64, Trunk trunk, float *embedding) {
  using Wide = Convolution<16, 16, 32, 1>;
  using Middle = Convolution<32, 32, 16, 1>;
  using Narrow = Convolution<64, 64, 8, 1>;
  // Where maps and weights lie. Each width takes the place of the one before, except for the trunk that it starts from.
  char *wide = shared, *wide_hidden = wide + Wide::MAP_BYTES;
  char *narrow = shared, *narrow_hidden = narrow + Narrow::MAP_BYTES, *narrow_weights = narrow_hidden + Narrow::MAP_BYTES;
  char *middle = narrow_weights + Narrow::WEIGHT_BYTES, *middle_hidden = wide_hidden;
  Evaluation now = {weights, scales, wide_hidden + Wide::MAP_BYTES};
  clear_border<Wide>(wide, THREADS);
  clear_border<Wide>(wide_hidden, THREADS);
  load_image<Wide>(wide_hidden, images, blockIdx.x, channels, by_channel, by_pixel, THREADS);
  evaluated<Wide>(now, wide_hidden, [&](int pixel, int channel, const Four &v) {
    store(reinterpret_cast<bf16 *>(Wide::at(wide, pixel / 32, pixel % 32)) + channel, rectified(v));
  });
  int block = 0;
  for (; block < num_16; block++)
    evaluated_block<16, 16, 32, 1>(now, wide, wide_hidden, wide, trunk.relu[block], trunk.at[block]);

  __syncthreads();
  clear_border<Middle>(middle, THREADS);
  clear_border<Middle>(middle_hidden, THREADS);
  now.own_weights = middle_hidden + Middle::MAP_BYTES;
  evaluated_block<16, 32, 16, 2>(now, wide, middle_hidden, middle, trunk.relu[block], trunk.at[block], projects_32);
  for (block++; block < num_16 + num_32; block++)
    evaluated_block<32, 32, 16, 1>(now, middle, middle_hidden, middle, trunk.relu[block], trunk.at[block]);

  __syncthreads();
  clear_border<Narrow>(narrow, THREADS);
  clear_border<Narrow>(narrow_hidden, THREADS);
  now.own_weights = narrow_weights;
  evaluated_block<32, 64, 8, 2>(now, middle, narrow_hidden, narrow, trunk.relu[block], trunk.at[block], projects_64);
  for (block++; block < num_16 + num_32 + num_64; block++)
    evaluated_block<64, 64, 8, 1>(now, narrow, narrow_hidden, narrow, trunk.relu[block], trunk.at[block]);
  __syncthreads();
  if (threadIdx.x < 64) {
    float sum = 0.f;
    for (int pixel = 0; pixel < 64; pixel++)
      sum += low(reinterpret_cast<bf16 *>(Narrow::at(narrow, pixel / 8, pixel % 8))[threadIdx.x]);
    embedding[blockIdx.x * 64 + threadIdx.x] = sum / 64;
  }
}
