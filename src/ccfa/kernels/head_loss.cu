// L_cls of a head that compares directions, and its gradients; head_loss.py launches both kernels.
//
// head_loss_rows: a block has a few features f, and a warp of it has slabs of 32 proxies w in shared memory. In the
// first pass a lane computes the dot products of one proxy with all features of the block. Then a warp has a feature:
// the criterion, and what its gradient with respect to each f . w would be if lengths were constant. In the second pass
// a lane has 4 dimensions of the features' gradients. If there are more slabs than places for them, a warp reads some
// again: it works on its slabs forwards in the first pass and backwards in the second.
//
// head_loss_proxies: a block has a few proxies and sums over all features. One more block sums the losses of all rows.
//
// With G = sum of coefficient * w, a feature's gradient is G - (G . u) u, where u = f / |f|, and a proxy's likewise.
//
// Every sum has a fixed order: results are bit-identical from run to run.
//
// Macros: DIM, PROXIES (per class), CRITERION (0 cross entropy, 1 NCA, 2 exclusive NCA), ROWS (features per block),
// WARPS (at most, per block of head_loss_rows), IN_GLOBAL, which is 1 if the cosines of a block do not fit into shared
// memory, TILE and THREADS (proxies and threads per block of head_loss_proxies).

#define UNROLL _Pragma("unroll")  // without it, arrays would not be registers

constexpr unsigned LANES = DIM / 4;          // that have a vector, 4 numbers each
constexpr unsigned GROUPS = 32 / LANES;      // of lanes in a warp
constexpr unsigned STRIDE = DIM + 4;         // of a proxy in shared memory: 8 lanes that read 8 proxies use all banks
constexpr unsigned OWNED = (DIM + 31) / 32;  // numbers of a vector that a lane has when a whole warp has the vector
constexpr unsigned PARTS = THREADS / 32;     // of the sum over all features: one for each warp
constexpr unsigned ALL = 0xffffffff;         // lanes
constexpr float SMALLEST = 1e-24f;           // squared length: the eps of torch's normalize, squared

struct alignas(16) Four { float at[4]; };

struct Class {
    float y, by_s, gradient;  // the sum of softmax(s) s; 1 / sum of exp(s), later times dl/d(y |f|); dl/dlogit
};

__device__ const Four& four(const float* numbers) { return *reinterpret_cast<const Four*>(numbers); }

__device__ void write_four(float* to, const float (&from)[4]) {
    *reinterpret_cast<Four*>(to) = {from[0], from[1], from[2], from[3]};
}

__device__ float sum_over_warp(float value) {
    UNROLL for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(ALL, value, distance);
    return value;
}

__device__ float largest_in_warp(float value) {
    UNROLL for (int distance = 16; distance; distance /= 2) value = fmaxf(value, __shfl_xor_sync(ALL, value, distance));
    return value;
}

// The sum over groups of lanes, of numbers that belong to the same dimensions.
template <unsigned N> __device__ void sum_over_groups(float (&sums)[N][4]) {
    UNROLL for (unsigned distance = LANES; distance < 32; distance *= 2)
        UNROLL for (unsigned i = 0; i < N; i++)
            UNROLL for (unsigned k = 0; k < 4; k++) sums[i][k] += __shfl_xor_sync(ALL, sums[i][k], distance);
}

// 16 bytes from global to shared memory, or zeros.
__device__ void start_copy(float* to, const float* from, bool exists) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(to), bytes = exists ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}

__device__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();  // the other lanes' copies, too
}

// Merges the proxies of a class; s is from -4 to 1, so that nothing can overflow.
__device__ Class merged(const float* cosines, float factor, float shift) {
    float total = 0, weighted = 0;
#pragma unroll 10
    for (unsigned i = 0; i < PROXIES; i++) {
        const float s = factor * cosines[i] + shift, power = expf(s);
        total += power;
        weighted += power * s;
    }
    return {weighted / total, 1 / total, 0};
}

// The warp writes the gradient of a vector, G - (G . u) u. G comes in `count` parts, `DISTANCE` numbers apart.
template <unsigned MOST, unsigned DISTANCE>
__device__ void write_gradient(float* to, const float* vector, const float* parts, unsigned count) {
    float numbers[OWNED] = {}, sums[OWNED] = {}, square = 0, along = 0;
    UNROLL for (unsigned i = 0; i < OWNED; i++) {
        const unsigned d = threadIdx.x % 32 + 32 * i;
        if (d >= DIM) continue;
        numbers[i] = vector[d];
        UNROLL for (unsigned part = 0; part < MOST; part++) sums[i] += part < count ? parts[part * DISTANCE + d] : 0;
        square += numbers[i] * numbers[i];
        along += numbers[i] * sums[i];
    }
    along = sum_over_warp(along) / fmaxf(sum_over_warp(square), SMALLEST);
    UNROLL for (unsigned i = 0; i < OWNED; i++) {
        const unsigned d = threadIdx.x % 32 + 32 * i;
        if (d < DIM) to[d] = sums[i] - along * numbers[i];
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) head_loss_rows(
    const float* __restrict__ features, const float* __restrict__ proxies, const float* __restrict__ scale_pointer,
    const long long* __restrict__ labels, const float* __restrict__ weights, float* __restrict__ sums_of_rows,
    float* __restrict__ of_features, float* coefficients, const float* __restrict__ other_weights, int num_others,
    int num_rows, int num_labels, int num_classes, float slope, float shift, unsigned places
) {
    alignas(16) extern __shared__ float shared[];
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const unsigned group = lane / LANES, part = lane % LANES * 4;  // of the proxies and dimensions that it reads
    const unsigned all_proxies = num_classes * PROXIES, slabs = (all_proxies + 31) / 32, width = slabs * 32;
    const unsigned first_row = blockIdx.x * ROWS, rows = min(ROWS, num_rows - (int)first_row);
    const float scale = *scale_pointer;

    float* const stored = shared;                                   // slabs of proxies (places, 32, STRIDE)
    float* const own = stored + places * 32 * STRIDE;               // features (rows, DIM)
    float* const inverses = own + ROWS * DIM;                       // 1 / |w| (width,)
    float* const whole = coefficients + (size_t)first_row * width;  // in global memory (rows, width)
    float* const cosines = IN_GLOBAL ? whole : inverses + width;    // times |f|; later the coefficients (rows, width)
    float* const factors = inverses + width * (IN_GLOBAL ? 1 : 1 + ROWS);  // slope / |f| (rows,)
    float* const weight_sums = factors + ROWS;                             // (warps,)
    Class* const classes = reinterpret_cast<Class*>(weight_sums + WARPS);  // (rows, classes)

    auto place = [&](unsigned slab) { return stored + slab % places * 32 * STRIDE; };
    auto fetch = [&](unsigned slab) {
        __syncwarp();  // until no lane reads what was there
        const float* const from = proxies + (size_t)(slab * 32 + group) * DIM + part;
        float* const to = place(slab) + group * STRIDE + part;
        UNROLL for (unsigned i = 0; i < 32; i += GROUPS)
            start_copy(to + i * STRIDE, from + i * DIM, slab * 32 + group + i < all_proxies);
    };
    for (unsigned slab = warp; slab < min(slabs, places); slab += warps) fetch(slab);

    for (unsigned i = threadIdx.x; i < ROWS * DIM; i += blockDim.x)
        own[i] = i < rows * DIM ? features[(size_t)first_row * DIM + i] : 0;
    float weight_sum = 0;
    for (int i = threadIdx.x; i < num_rows * num_labels; i += 4 * blockDim.x)
        UNROLL for (int j = i, k = 0; k < 4; k++, j += blockDim.x)  // all are read before any is used
            weight_sum += j < num_rows * num_labels ? weights[j] : 0;
    for (int i = threadIdx.x; i < num_others; i += blockDim.x) weight_sum += other_weights[i];
    weight_sum = sum_over_warp(weight_sum);
    if (lane == 0) weight_sums[warp] = weight_sum;
    __syncthreads();

    for (unsigned slab = warp; slab < slabs; slab += warps) {
        if (slab >= places) fetch(slab);
        wait_for_copies();
        const float* const proxy = place(slab) + lane * STRIDE;
        float dots[ROWS] = {}, square = 0;
#pragma unroll 4
        for (unsigned d = 0; d < DIM; d += 4) {
            const Four w = four(proxy + d);
            UNROLL for (unsigned k = 0; k < 4; k++) square += w.at[k] * w.at[k];
            UNROLL for (unsigned r = 0; r < ROWS; r++) {
                const Four f = four(own + r * DIM + d);
                UNROLL for (unsigned k = 0; k < 4; k++) dots[r] += w.at[k] * f.at[k];
            }
        }
        const float inverse = rsqrtf(fmaxf(square, SMALLEST));
        inverses[slab * 32 + lane] = inverse;
        UNROLL for (unsigned r = 0; r < ROWS; r++) cosines[r * width + slab * 32 + lane] = dots[r] * inverse;
    }
    __syncthreads();

    weight_sum = sum_over_warp(lane < warps ? weight_sums[lane] : 0);
    for (unsigned r = warp; r < rows; r += warps) {
        Class* const its = classes + r * num_classes;
        float* const cosine = cosines + r * width;
        float square = 0;
        for (unsigned d = lane; d < DIM; d += 32) square += own[r * DIM + d] * own[r * DIM + d];
        const float factor = slope * rsqrtf(fmaxf(sum_over_warp(square), SMALLEST));
        if (lane == 0) factors[r] = factor;
        float top = -1e30f, ties = 0, loss = 0, of_scale = 0;
#pragma unroll 1
        for (int c = lane; c < num_classes; c += 32) {  // a lane has these classes from here on
            its[c] = merged(cosine + c * PROXIES, factor, shift);
            top = fmaxf(top, scale < 0 ? -its[c].y : its[c].y);
        }
        __syncwarp();
        top = largest_in_warp(top);
        if (scale < 0) top = -top;  // of the y, the one of the largest logit
        // Rounded, since a product fused with a later difference would make exp(largest - largest) other than 1.
        const float largest = __fmul_rn(scale, top);
        auto logit = [&](int c) { return __fmul_rn(scale, its[c].y); };
        auto power = [&](int c, int label) { return CRITERION && c == label ? 0 : expf(logit(c) - largest); };
        if (CRITERION == 1) {
#pragma unroll 1
            for (int c = lane; c < num_classes; c += 32) ties += logit(c) == largest;
            ties = sum_over_warp(ties);
        }
#pragma unroll 1
        for (int l = 0; l < num_labels; l++) {
            const size_t index = (size_t)(first_row + r) * num_labels + l;
            const float weight = weights[index] / weight_sum;
            if (weight == 0) continue;
            const int label = (int)labels[index];
            float total = 0;
#pragma unroll 1
            for (int c = lane; c < num_classes; c += 32) total += power(c, label);
            total = sum_over_warp(total);
            if (CRITERION == 1) total += 1;  // the largest logit stands in the denominator once more, for the label
            const float value = logf(total) + (largest - logit(label));
            if (CRITERION == 2 && value <= 0) continue;
            loss += weight * value;
            const float rest = 1 / total;
#pragma unroll 1
            for (int c = lane; c < num_classes; c += 32) {
                float share = rest * power(c, label);
                if (CRITERION == 1 && logit(c) == largest) share += rest / ties;  // as the gradient of torch's amax
                its[c].gradient += weight * (share - (c == label));
            }
        }
#pragma unroll 1
        for (int c = lane; c < num_classes; c += 32) {
            of_scale += its[c].gradient * (its[c].y - top);  // the gradients sum to 0, so that any constant will do
            its[c].by_s *= its[c].gradient * scale * factor;
        }
        of_scale = sum_over_warp(of_scale);
        if (lane == 0) {
            sums_of_rows[first_row + r] = loss;
            sums_of_rows[num_rows + first_row + r] = of_scale;
        }
    }
    if (!coefficients && !of_features) return;
    __syncthreads();

    float sums[ROWS][4] = {};
    const int last = warp < slabs ? int(warp + (slabs - 1 - warp) / warps * warps) : -1;
    for (int slab = last; slab >= 0; slab -= warps) {
        const bool reads = of_features && slab + places < slabs;  // a later slab took its place
        if (reads) fetch(slab);
        const unsigned proxy = slab * 32 + lane;
        float found[ROWS];
        UNROLL for (unsigned r = 0; r < ROWS; r++) {
            const Class its = proxy < all_proxies ? classes[r * num_classes + proxy / PROXIES] : Class{};
            const float s = factors[r] * cosines[r * width + proxy] + shift;
            found[r] = its.by_s * expf(s) * (1 + s - its.y) * inverses[proxy];
        }
        UNROLL for (unsigned r = 0; r < ROWS; r++) cosines[r * width + proxy] = found[r];
        if (!IN_GLOBAL && coefficients)
            UNROLL for (unsigned r = 0; r < ROWS; r++) whole[r * width + proxy] = found[r];
        if (!of_features) continue;
        if (reads) wait_for_copies();
        __syncwarp();
#pragma unroll 2
        for (unsigned first = group * LANES; first < (group + 1) * LANES; first += 4) {
            Four w[4];
            UNROLL for (unsigned j = 0; j < 4; j++) w[j] = four(place(slab) + (first + j) * STRIDE + part);
            UNROLL for (unsigned r = 0; r < ROWS; r++) {
                const Four coefficient = four(cosines + r * width + slab * 32 + first);
                UNROLL for (unsigned j = 0; j < 4; j++)
                    UNROLL for (unsigned k = 0; k < 4; k++) sums[r][k] += coefficient.at[j] * w[j].at[k];
            }
        }
    }
    if (!of_features) return;
    sum_over_groups(sums);
    __syncwarp();
    if (last >= 0 && group == 0)  // to its own place: it needs the proxies no longer
        UNROLL for (unsigned r = 0; r < ROWS; r++) write_four(place(warp) + r * DIM + part, sums[r]);
    __syncthreads();
    float* const to = of_features + (size_t)first_row * DIM;
    for (unsigned r = warp; r < rows; r += warps)
        write_gradient<WARPS, 32 * STRIDE>(to + r * DIM, own + r * DIM, stored + r * DIM, min(slabs, warps));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) head_loss_proxies(
    const float* __restrict__ features, const float* __restrict__ proxies, const float* __restrict__ sums_of_rows,
    const float* __restrict__ coefficients, float* __restrict__ loss, float* __restrict__ of_scale,
    float* __restrict__ of_proxies, int num_rows, int all_proxies
) {
    alignas(16) extern __shared__ float parts[];  // (warps, TILE, DIM)
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / LANES, part = lane % LANES * 4;
    if (blockIdx.x == gridDim.x - 1) {
        if (warp > 1) return;
        float sum = 0;
#pragma unroll 8
        for (int row = lane; row < num_rows; row += 32) sum += sums_of_rows[warp * num_rows + row];
        sum = sum_over_warp(sum);
        if (lane == 0) *(warp == 0 ? loss : of_scale) = sum;
        return;
    }
    const unsigned first = blockIdx.x * TILE, width = (all_proxies + 31) / 32 * 32;
    constexpr int STEP = PARTS * GROUPS;
    float sums[TILE][4] = {};
    for (int row = warp * GROUPS + group; row < num_rows; row += 4 * STEP) {
        Four f[4], coefficient[4][TILE / 4];
        UNROLL for (int i = 0; i < 4; i++) {  // all are read before any is used
            const bool exists = row + i * STEP < num_rows;
            f[i] = exists ? four(features + (size_t)(row + i * STEP) * DIM + part) : Four{};
            const float* const its = coefficients + (size_t)(row + i * STEP) * width + first;
            UNROLL for (unsigned j = 0; j < TILE / 4; j++) coefficient[i][j] = exists ? four(its + j * 4) : Four{};
        }
        UNROLL for (int i = 0; i < 4; i++)
            UNROLL for (unsigned j = 0; j < TILE; j++)
                UNROLL for (unsigned k = 0; k < 4; k++) sums[j][k] += coefficient[i][j / 4].at[j % 4] * f[i].at[k];
    }
    sum_over_groups(sums);
    if (group == 0)
        UNROLL for (unsigned j = 0; j < TILE; j++) write_four(parts + (warp * TILE + j) * DIM + part, sums[j]);
    __syncthreads();
    if (warp >= TILE || first + warp >= all_proxies) return;
    const size_t start = (size_t)(first + warp) * DIM;
    write_gradient<PARTS, TILE * DIM>(of_proxies + start, proxies + start, parts + warp * DIM, PARTS);
}
