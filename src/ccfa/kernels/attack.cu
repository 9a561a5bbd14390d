// The whole N-step attack in one kernel, for heads that compare directions; attack.py launches it.
//
// A block attacks a few features. A warp holds the unit directions of a slab of 32 proxies in registers: each group of
// 8 lanes has 8 proxies, and each lane of a group has 1/8 of the dimensions. The same registers serve both passes of a
// step: the first computes cosines, the second the gradient. With more slabs than warps, a warp works on several in
// turn, forwards in the first pass and backwards in the second, and reads all but one again: from shared memory as many
// as fit there, the others from global memory. With fewer slabs, several teams of warps hold the same slabs and work on
// different features.
//
// A sum over lanes leaves each lane with the part of the sum that it owns. Each lane numbers what it holds differently
// (slot ^ lane), so that the part to send is always the upper half of the slots, without a selection by lane.
//
// Every sum has a fixed order: results are bit-identical from run to run.
//
// Macros: DIM, PROXIES (per class), CRITERION (0 cross entropy, 1 NCA, 2 exclusive NCA), ROWS (features per block, at
// most one for each warp), THREADS, and IN_GLOBAL, which is 1 if the cosines with all proxies do not fit into shared
// memory.

// Loops that are unrolled, so that arrays become registers.
#define UNROLL _Pragma("unroll")
#define EACH(i, count) UNROLL for (unsigned i = 0; i < count; i++)

constexpr unsigned WARPS = THREADS / 32;
constexpr unsigned PART = DIM / 8;               // dimensions of a lane
constexpr unsigned WIDTH = PART < 4 ? PART : 4;  // numbers read at once; also the number of orders, see `Lane`
constexpr unsigned UNIT = PART / WIDTH;          // neighbouring dimensions: a lane owns one unit of a sum over the warp
constexpr unsigned OWNERS = DIM < 32 ? 2 : 1;    // lanes that own the same unit
constexpr unsigned ALL = 0xffffffff;             // lanes
constexpr float SMALLEST = 1e-24f;               // squared length: the eps of torch's normalize, squared
constexpr float LOWEST = -1e30f;                 // logit

template <unsigned N> struct alignas(4 * N) Vector { float at[N]; };
using Unit = Vector<UNIT>;

struct alignas(8) Class {
    float y, by_s;  // the sum of softmax(s) s; 1 / sum of exp(s), later times dl/dy
};

struct Lane {
    unsigned number, part, order;  // its place in the warp; which dimensions it has; how it numbers their units

    __device__ Lane() : number(threadIdx.x % 32) {
        asm volatile("" : "+r"(number));  // hidden, or the compiler keeps all that follows from it in registers
        part = number % 8;
        order = number / 8 * WIDTH / 4;
    }
    __device__ unsigned owned() const { return order * 8 + part; }  // unit of a vector of DIM numbers
};

// Where a feature, as pass 1 reads it, has a unit: the first numbers of all 8 lanes, then the next ones.
__device__ constexpr unsigned place(unsigned unit, unsigned part) {
    return (unit * UNIT / WIDTH * 8 + part) * WIDTH + unit * UNIT % WIDTH;
}

// The sum over the 8 lanes of a group of what they hold for the lane's own proxy.
__device__ float sum_over_group(float (&slots)[8]) {
    UNROLL for (int half = 4; half; half /= 2)
        EACH(j, half) slots[j] += __shfl_xor_sync(ALL, slots[j + half], half);
    return slots[0];
}

// The reverse: each lane gets what every lane of its group has for its own proxy.
__device__ void share_in_group(float own, float (&slots)[8]) {
    slots[0] = own;
    UNROLL for (int half = 1; half < 8; half *= 2)
        EACH(j, half) slots[j + half] = __shfl_xor_sync(ALL, slots[j], half);
}

// The sum over the 4 groups of a warp; the lane's own unit comes first.
__device__ void sum_over_groups(float (&slots)[PART]) {
    EACH(i, PART / 2) slots[i] += __shfl_xor_sync(ALL, slots[i + PART / 2], 16);
    EACH(i, UNIT) slots[i] += __shfl_xor_sync(ALL, slots[i + (OWNERS == 1 ? UNIT : 0)], 8);
}

__device__ float sum_over_warp(float value) {
    UNROLL for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(ALL, value, distance);
    return value;
}

__device__ int ordered(int bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }  // compare as the floats do

__device__ float largest_in_warp(float value) {
    return __int_as_float(ordered(__reduce_max_sync(ALL, ordered(__float_as_int(value)))));
}

// The lane's classes, four at a time; those that do not exist have the lowest logit. The logits are rounded, since a
// product fused with a later difference would make exp(largest - largest) other than 1.
template <typename Visit> __device__ void visit_logits(const Class* classes, int count, float scale, Visit visit) {
#pragma unroll 1
    for (int first = threadIdx.x % 32; first < count; first += 128)
        UNROLL for (int c = first; c < first + 128; c += 32)
            visit(c, c < count ? __fmul_rn(scale, classes[c].y) : LOWEST);
}

// The lane's part of a slab of unit directions: slot j has proxy j ^ part of the group; those beyond `end` are 0.
__device__ void read_slab(float (&directions)[8][PART], const float* weights, unsigned slab, unsigned end) {
    const Lane lane;
    const unsigned first = slab * 32 + lane.number / 8 * 8;
    EACH(q, WIDTH) {
        const Unit* const rows = reinterpret_cast<const Unit*>(weights + (size_t)first * DIM);
        const Unit* const column = rows + (q ^ lane.order) * 8 + lane.part;
        EACH(j, 8) {
            const Unit unit = first + j < end ? column[j * (DIM / UNIT)] : Unit{};
            EACH(k, UNIT) directions[j][q * UNIT + k] = unit.at[k];
        }
    }
    UNROLL for (unsigned bit = 1; bit < 8; bit *= 2)  // reading in the order of slots would not be contiguous
        EACH(j, 8) EACH(i, PART) {
                if (j & bit) continue;
                const float low = directions[j][i], high = directions[j | bit][i];
                directions[j][i] = lane.part & bit ? high : low;
                directions[j | bit][i] = lane.part & bit ? low : high;
            }
    float squares[8] = {}, factors[8];
    EACH(j, 8) EACH(i, PART) squares[j] += directions[j][i] * directions[j][i];
    share_in_group(rsqrtf(fmaxf(sum_over_group(squares), SMALLEST)), factors);
    EACH(j, 8) EACH(i, PART) directions[j][i] *= factors[j];
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attack(
    const float* __restrict__ start, const float* __restrict__ weights, const long long* __restrict__ targets,
    const float* __restrict__ alphas, const float* __restrict__ scale_pointer, float* __restrict__ attacked,
    long long* __restrict__ labels, float* __restrict__ workspace, int num_rows, int num_classes, int steps,
    float slope, float shift, unsigned num_stored
) {
    alignas(16) extern __shared__ float shared[];
    const unsigned warp = threadIdx.x / 32, all_proxies = num_classes * PROXIES, slabs = (all_proxies + 31) / 32;
    const unsigned rows = min(ROWS, num_rows - (int)blockIdx.x * ROWS);
    const float scale = *scale_pointer;

    float* const features = shared;                          // (rows, orders, DIM)
    float* const partial = features + ROWS * WIDTH * DIM;    // gradients (warps, rows, DIM)
    float* const factors = partial + WARPS * ROWS * DIM;     // slope / |z|, of each warp's row
    float* const stored = factors + WARPS;                   // slabs, as lanes hold them (slabs, 2 * PART, 32, 4)
    float* const results = IN_GLOBAL ? workspace + (size_t)blockIdx.x * ROWS * num_classes * (PROXIES + 2 + PROXIES % 2)
                                     : stored + num_stored * 32 * DIM;
    Class* const classes = reinterpret_cast<Class*>(results);  // (rows, classes)
    float* const cosines = results + 2 * ROWS * num_classes;   // times |z| (rows, classes, proxies)

    // A team has all slabs, the warp those from `first` to `last`, and every `teams`-th feature.
    const unsigned span = min(slabs, WARPS), teams = WARPS / span, team = warp / span;
    const int first = team < teams ? warp % span : slabs;
    const int last = team < teams ? first + int((slabs - 1 - first) / WARPS * WARPS) : -1;
    float directions[8][PART];
    auto hold = [&](unsigned slab, bool again) {
        Vector<4>* const kept = reinterpret_cast<Vector<4>*>(stored) + slab * (8 * DIM) + threadIdx.x % 32;
        float* const slots = &directions[0][0];
        if (again && slab < num_stored) {
            EACH(v, 2 * PART) EACH(k, 4) slots[4 * v + k] = kept[v * 32].at[k];
            return;
        }
        read_slab(directions, weights, slab, all_proxies);
        if (slab >= num_stored) return;
        EACH(v, 2 * PART) kept[v * 32] = *reinterpret_cast<const Vector<4>*>(slots + 4 * v);
    };

    // Warp r keeps feature r: each lane the unit that it owns.
    const bool keeps = warp < rows;
    const size_t row = (size_t)blockIdx.x * ROWS + warp;
    Unit z = {};
    float inverse_length = 0, alpha = 0;
    int target = 0, best = 0;
    if (keeps) {
        z = reinterpret_cast<const Unit*>(start + row * DIM)[Lane().owned()];
        alpha = alphas[row];
        target = (int)targets[row];
    }
    if (last >= 0) hold(first, false);

    for (int step = 0;; step++) {  // the last one is for the labels only
        const Lane lane;
        if (keeps) {
            EACH(order, WIDTH) {
                float* const feature = features + (warp * WIDTH + order) * DIM;
                *reinterpret_cast<Unit*>(feature + (place(lane.order, lane.part) ^ place(order, 0))) = z;
            }
        }
        __syncthreads();
        if (keeps) {  // only now, since the length is not needed before the next barrier
            float square = 0;
            EACH(k, UNIT) square += z.at[k] * z.at[k];
            inverse_length = rsqrtf(fmaxf(sum_over_warp(square) / OWNERS, SMALLEST));
            if (lane.number == 0) factors[warp] = slope * inverse_length;
        }
        for (int slab = first; slab < (int)slabs; slab += WARPS) {
            if (slab != first) hold(slab, step > 0);
            const unsigned proxy = slab * 32 + lane.number;
#pragma unroll 1
            for (unsigned r = team; r < rows; r += teams) {
                const float* const feature = features + (r * WIDTH + lane.order) * DIM + lane.part * WIDTH;
                float slots[8] = {};
                EACH(h, UNIT) {
                    const auto numbers = *reinterpret_cast<const Vector<WIDTH>*>(feature + h * 8 * WIDTH);
                    EACH(k, WIDTH) EACH(j, 8) slots[j] += directions[j][h * WIDTH + k] * numbers.at[k];
                }
                const float cosine = sum_over_group(slots);
                if (proxy < all_proxies) cosines[r * all_proxies + proxy] = cosine;
            }
        }
        __syncthreads();
        for (unsigned i = threadIdx.x; i < rows * num_classes; i += THREADS) {  // a feature and a class
            const float factor = factors[i / num_classes];
            float total = 0, weighted = 0;
#pragma unroll 10
            for (unsigned proxy = 0; proxy < PROXIES; proxy++) {
                const float s = factor * cosines[i * PROXIES + proxy] + shift;
                const float power = expf(s);  // s is from -4 to 1: nothing can overflow
                total += power;
                weighted += power * s;
            }
            classes[i] = {weighted / total, 1 / total};
        }
        __syncthreads();
        if (keeps) {
            Class* const its = classes + warp * num_classes;
            float largest = LOWEST, total = 0;
            best = 0;
            visit_logits(its, num_classes, scale, [&](int c, float logit) {
                best = logit > largest ? c : best;
                largest = fmaxf(largest, logit);
            });
            const float top = largest_in_warp(largest);
            best = __reduce_min_sync(ALL, largest == top ? best : num_classes);
            visit_logits(its, num_classes, scale, [&](int c, float logit) {
                total += CRITERION && c == target ? 0 : expf(logit - top);
            });
            total = sum_over_warp(total);
            if (CRITERION == 1) total += 1;  // the largest logit stands in the denominator once more, for the target
            const bool active = CRITERION != 2 || logf(total) + top > __fmul_rn(scale, its[target].y);
            const float part = 1 / total;
            visit_logits(its, num_classes, scale, [&](int c, float logit) {
                float share = CRITERION && c == target ? 0 : part * expf(logit - top);
                if (CRITERION == 1 && c == best) share += part;
                if (c == target) share -= 1;
                if (c < num_classes) its[c].by_s *= active ? slope * scale * share : 0;
            });
        }
        if (step == steps) break;
        __syncthreads();
        for (int slab = last; slab >= 0; slab -= WARPS) {
            if (slab != last) hold(slab, true);
            const unsigned proxy = min(slab * 32 + lane.number, all_proxies - 1);  // beyond it directions are 0
            const float* cosine = cosines + team * all_proxies + proxy;
            const Class* its = classes + team * num_classes + proxy / PROXIES;
#pragma unroll 1
            for (unsigned r = team; r < rows; r += teams, cosine += teams * all_proxies, its += teams * num_classes) {
                const float s = factors[r] * *cosine + shift;
                const Class merged = *its;
                float coefficients[8], slots[PART] = {};
                share_in_group(merged.by_s * expf(s) * (1 + s - merged.y), coefficients);
                EACH(j, 8) EACH(i, PART) slots[i] += coefficients[j] * directions[j][i];
                sum_over_groups(slots);
                Unit* const sum = reinterpret_cast<Unit*>(partial + (warp * ROWS + r) * DIM) + lane.owned();
                Unit more = slab == last ? Unit{} : *sum;
                EACH(k, UNIT) more.at[k] += slots[k];
                if (OWNERS == 1 || lane.number % 16 < 8) *sum = more;  // once: a second owner would add again
            }
        }
        __syncthreads();
        if (keeps) {
            const float* const its = partial + (warp % teams * span * ROWS + warp) * DIM;
            Unit gradient = {};
            float along = 0;
#pragma unroll 8
            for (unsigned i = 0; i < WARPS; i++) {
                if (i >= span) continue;
                const Unit more = reinterpret_cast<const Unit*>(its + i * ROWS * DIM)[lane.owned()];
                EACH(k, UNIT) gradient.at[k] += more.at[k];
            }
            EACH(k, UNIT) along += gradient.at[k] * (z.at[k] * inverse_length);
            along = sum_over_warp(along) / OWNERS;
            EACH(k, UNIT) {  // only the sign counts: no division by |z|
                const float tangent = gradient.at[k] - along * (z.at[k] * inverse_length);
                z.at[k] -= alpha * (float)((tangent > 0) - (tangent < 0));
            }
        }
    }
    if (!keeps) return;
    reinterpret_cast<Unit*>(attacked + row * DIM)[Lane().owned()] = z;
    labels[row] = best;
}
