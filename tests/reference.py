"""Slow NumPy versions of the formulas, written from the paper's equations and the published behaviour."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Labels = NDArray[np.int64]


def unit(vector: Array) -> Array:
    """The vector divided by its L2 norm; a zero vector stays zero."""
    return vector / max(float(np.sqrt(np.sum(vector**2))), 1e-12)


def cosine(first: Array, second: Array) -> float:
    """The cosine of the angle between two vectors."""
    return float(np.sum(unit(first) * unit(second)))


def cross_entropy(logits: Array, labels: Labels) -> Array:
    """-log softmax at the label, one value per row; logits already carry the scale."""
    losses = []
    for row, label in zip(logits, labels, strict=True):
        shifted = row - row.max()
        losses.append(-shifted[label] + np.log(np.sum(np.exp(shifted))))
    return np.array(losses)


def nca(logits: Array, labels: Labels) -> Array:
    """PODNet's NCA as published: -l_y + log(exp(max_j l_j) + sum_{j != y} exp(l_j))."""
    losses = []
    for row, label in zip(logits, labels, strict=True):
        largest = row.max()
        total = 1.0  # exp(max - max)
        for j, logit in enumerate(row):
            if j != label:
                total += np.exp(logit - largest)
        losses.append(-row[label] + largest + np.log(total))
    return np.array(losses)


def nca_exclusive(logits: Array, labels: Labels) -> Array:
    """The supplement's NCA: [-log exp(l_y) / sum_{j != y} exp(l_j)]_+."""
    losses = []
    for row, label in zip(logits, labels, strict=True):
        others = np.array([logit for j, logit in enumerate(row) if j != label])
        largest = others.max()
        losses.append(max(0.0, -row[label] + largest + np.log(np.sum(np.exp(others - largest)))))
    return np.array(losses)


def cross_entropy_gradient(logits: Array, label: int) -> Array:
    """d cross_entropy / d logits for one row: softmax minus one-hot."""
    weights = np.exp(logits - logits.max())
    gradient = weights / weights.sum()
    gradient[label] -= 1.0
    return gradient


def nca_gradient(logits: Array, label: int) -> Array:
    """d nca / d logits for one row; the gradient flows through the maximum too."""
    weights = np.exp(logits - logits.max())
    weights[label] = 0.0
    weights[int(np.argmax(logits))] += 1.0
    gradient = weights / weights.sum()
    gradient[label] -= 1.0
    return gradient


@dataclass(frozen=True)
class CosineHead:
    """UCIR's classifier: l_c = sigma * cos(w_c, h)."""

    weights: Array  # [classes, dim]
    scale: float

    def similarities(self, feature: Array) -> Array:
        """Cosines of one feature with every class."""
        return np.array([cosine(weight, feature) for weight in self.weights])

    def logits(self, feature: Array) -> Array:
        """Scaled cosines of one feature."""
        return self.scale * self.similarities(feature)

    def jacobian(self, feature: Array) -> Array:
        """d logits / d feature, [classes, dim]."""
        norm = np.sqrt(np.sum(feature**2))
        tangents = [unit(weight) - cosine(weight, feature) * unit(feature) for weight in self.weights]
        return self.scale * np.array(tangents) / norm


@dataclass(frozen=True)
class LocalSimilarityHead:
    """PODNet's classifier: s_cp = -|h_hat - w_hat_cp|^2, merged over proxies by their own softmax."""

    proxies: Array  # [classes, proxies, dim]
    scale: float
    margin: float = 0.0

    def proxy_similarities(self, feature: Array) -> Array:
        """Minus the squared distance of unit vectors, [classes, proxies]."""
        num_classes, num_proxies, _ = self.proxies.shape
        result = np.zeros((num_classes, num_proxies))
        for c in range(num_classes):
            for p in range(num_proxies):
                result[c, p] = -np.sum((unit(feature) - unit(self.proxies[c, p])) ** 2)
        return result

    def similarities(self, feature: Array) -> Array:
        """y_c = sum_p softmax_p(s_c)_p s_cp."""
        merged = []
        for row in self.proxy_similarities(feature):
            weights = np.exp(row) / np.sum(np.exp(row))
            merged.append(np.sum(weights * row))
        return np.array(merged)

    def logits(self, feature: Array, label: int | None = None) -> Array:
        """eta * y, with the margin taken off the label's similarity where a label is given."""
        values = self.similarities(feature)
        if label is not None:
            values[label] -= self.margin
        return self.scale * values

    def jacobian(self, feature: Array) -> Array:
        """d logits / d feature, [classes, dim]: dy/ds_p = a_p (1 + s_p - y), ds/dh = 2 dcos/dh."""
        norm = np.sqrt(np.sum(feature**2))
        rows = []
        for proxies, row in zip(self.proxies, self.proxy_similarities(feature), strict=True):
            weights = np.exp(row) / np.sum(np.exp(row))
            merged = np.sum(weights * row)
            total = np.zeros_like(feature)
            for proxy, weight, similarity in zip(proxies, weights, row, strict=True):
                tangent = (unit(proxy) - cosine(proxy, feature) * unit(feature)) / norm
                total += weight * (1.0 + similarity - merged) * 2.0 * tangent
            rows.append(self.scale * total)
        return np.array(rows)


@dataclass(frozen=True)
class LinearHead:
    """l_c = w_c . h + b_c."""

    weights: Array
    bias: Array

    def logits(self, feature: Array) -> Array:
        """Affine scores of one feature."""
        return np.array([np.sum(w * feature) + b for w, b in zip(self.weights, self.bias, strict=True)])


def pod_spatial(previous_maps: list[Array], maps: list[Array]) -> float:
    """POD-spatial as published: unit vectors of pooled squares, their distance, mean over rows and levels."""
    levels = []
    for previous, current in zip(previous_maps, maps, strict=True):
        distances = []
        for old, new in zip(previous, current, strict=True):
            distances.append(np.linalg.norm(unit(_pooled_squares(old)) - unit(_pooled_squares(new))))
        levels.append(np.mean(distances))
    return float(np.mean(levels))


def _pooled_squares(image: Array) -> Array:
    channels, height, width = image.shape
    rows = [np.sum(image[c, h, :] ** 2) for c in range(channels) for h in range(height)]
    columns = [np.sum(image[c, :, w] ** 2) for c in range(channels) for w in range(width)]
    return np.array(rows + columns)


def pod_spatial_paper(previous_maps: list[Array], maps: list[Array]) -> float:
    """The supplement's POD-width + POD-height, summed over levels, mean over rows."""
    num_rows = len(maps[0])
    total = 0.0
    for previous, current in zip(previous_maps, maps, strict=True):
        _, channels, height, width = current.shape
        for old, new in zip(previous, current, strict=True):
            for c in range(channels):
                for h in range(height):
                    total += abs(np.sum(old[c, h, :]) - np.sum(new[c, h, :]))
                for w in range(width):
                    total += abs(np.sum(old[c, :, w]) - np.sum(new[c, :, w]))
    return total / num_rows


def cosine_distance(previous: Array, current: Array) -> float:
    """1 - <f_{k-1}, f_k> of unit features, mean over rows."""
    return float(np.mean([1.0 - cosine(old, new) for old, new in zip(previous, current, strict=True)]))


def squared_distance(previous: Array, current: Array) -> float:
    """|h_{k-1} - h_k|^2, mean over rows."""
    return float(np.mean([np.sum((old - new) ** 2) for old, new in zip(previous, current, strict=True)]))


def geodesic_kernel(previous: Array, current: Array) -> Array:
    """GeoDL's G, by the closed form of the geodesic flow kernel (Gong et al., CVPR 2012)."""

    def basis(rows: Array) -> Array:
        columns = rows.T - rows.T.mean(axis=0)  # one column per image, less its own mean
        return np.linalg.svd(columns, full_matrices=False)[0][:, : min(rows.shape) - 2]

    start, end = basis(previous), basis(current)
    left, cosines, right = np.linalg.svd(start.T @ end)
    kernel = np.zeros((previous.shape[1],) * 2)
    for a, b, cos in zip((start @ left).T, (end @ right.T).T, np.clip(cosines, 0, 1), strict=True):
        t = max(np.arccos(cos), 1e-6)  # a = b needs no way
        r = (b - a * cos) / np.sin(t)  # where the way from a to b leads, at a right angle to a
        kernel += (1 + np.sin(2 * t) / (2 * t)) / 2 * np.outer(a, a)
        kernel += (1 - np.cos(2 * t)) / (4 * t) * (np.outer(a, r) + np.outer(r, a))
        kernel += (1 - np.sin(2 * t) / (2 * t)) / 2 * np.outer(r, r)
    return kernel


def margin_ranking(
    similarities: Array, labels: Labels, num_old: int, margin: float = 0.5, num_negatives: int = 2
) -> float:
    """UCIR's margin ranking: old-labelled rows against their nearest new classes, mean over the pairs."""
    pairs = []
    for row, label in zip(similarities, labels, strict=True):
        if label < num_old:
            nearest = sorted(row[num_old:], reverse=True)[:num_negatives]
            pairs += [max(0.0, margin - row[label] + negative) for negative in nearest]
    return float(np.mean(pairs)) if pairs else 0.0


def target_class(feature: Array, label: int, head: CosineHead | LocalSimilarityHead, num_old: int) -> int:
    """Algorithm 1, line 3: the most confident old class of the current head that is not the label."""
    logits = head.logits(feature)
    return max((c for c in range(num_old) if c != label), key=lambda c: logits[c])


def attack(
    feature: Array,
    target: int,
    old_head: CosineHead | LocalSimilarityHead,
    logit_gradient: Callable[[Array, int], Array],
    steps: int,
    step_size: float,
) -> tuple[Array, int]:
    """Algorithm 1, lines 4-8: the attacked feature and its pseudo-label."""
    z = feature.copy()
    for _ in range(steps):
        gradient = logit_gradient(old_head.logits(z), target) @ old_head.jacobian(z)
        z = z - step_size * np.sign(gradient)
    return z, int(np.argmax(old_head.logits(z)))


def herd(embeddings: Array, num_exemplars: int) -> list[int]:
    """iCaRL's herding: rows whose running mean follows the class mean, in rank order."""
    rows = [unit(row) for row in embeddings]
    mean = np.mean(rows, axis=0)
    direction = mean.copy()
    chosen: list[int] = []
    for _ in range(1000):
        if len(chosen) == min(num_exemplars, len(rows)):
            break
        pick = int(np.argmax([np.sum(direction * row) for row in rows]))
        if pick not in chosen:
            chosen.append(pick)
        direction = direction + mean - rows[pick]
    return chosen


def weighted_discrepancy(previous_maps: list[Array], maps: list[Array], importance: list[Array]) -> float:
    """As published: distance of unit vectors of squares, channel by channel; mean over channels, rows, then levels."""
    levels = []
    for previous, current, weights in zip(previous_maps, maps, importance, strict=True):
        values = []
        for old, new in zip(previous, current, strict=True):
            for c, weight in enumerate(weights):
                values.append(weight * np.linalg.norm(unit(old[c].ravel() ** 2) - unit(new[c].ravel() ** 2)))
        levels.append(np.mean(values))
    return float(np.mean(levels))


def weighted_discrepancy_paper(previous_maps: list[Array], maps: list[Array], importance: list[Array]) -> float:
    """The paper's L_disc: sum over levels and channels of I E |Z' - Z|_F^2."""
    total = 0.0
    for previous, current, weights in zip(previous_maps, maps, importance, strict=True):
        for c, weight in enumerate(weights):
            squares = [np.sum((old[c] - new[c]) ** 2) for old, new in zip(previous, current, strict=True)]
            total += weight * float(np.mean(squares))
    return total


def importance(gradients: list[list[Array]]) -> list[Array]:
    """Of each level, |g_c|_F^2 averaged over the rows of a batch, added over batches, divided by the channels' mean.

    `gradients` has one list of levels a batch, each (rows, channels, height, width).
    """
    result = []
    for level in range(len(gradients[0])):
        num_channels = gradients[0][level].shape[1]
        totals = np.zeros(num_channels)
        for batch in gradients:
            for c in range(num_channels):
                totals[c] += np.mean([np.sum(row[c] ** 2) for row in batch[level]])
        result.append(totals / totals.mean())
    return result


def mixup(images: Array, partners: Labels, share: float) -> Array:
    """lambda x_i + (1 - lambda) x_j."""
    return np.stack([share * images[i] + (1 - share) * images[j] for i, j in enumerate(partners)])


def cut_box(height: int, width: int, row: int, column: int, share: float) -> tuple[int, int, int, int]:
    """Top, bottom, left, right of the published rectangle: whole half-sides around a pixel, cut at the border."""
    half_height = int(height * np.sqrt(1 - share)) // 2
    half_width = int(width * np.sqrt(1 - share)) // 2
    top, bottom = np.clip([row - half_height, row + half_height], 0, height)
    left, right = np.clip([column - half_width, column + half_width], 0, width)
    return int(top), int(bottom), int(left), int(right)


def pair_labels(new_classes: list[int], num_seen: int) -> dict[frozenset[int], int]:
    """The auxiliary label of each unordered pair, counted through in order."""
    return {frozenset(pair): num_seen + i for i, pair in enumerate(combinations(new_classes, 2))}


def semantic_augmentation(
    prototypes: Array,
    covariances: Array,
    labels: Labels,
    weights: Array,
    biases: Array,
    strength: float,
    scale: float,
) -> float:
    """IL2A's L_seman, entry by entry."""
    losses = []
    for prototype, covariance, label in zip(prototypes, covariances, labels, strict=True):
        logits = np.zeros((1, len(weights)))
        for c, weight in enumerate(weights):
            difference = weight - weights[label]
            logits[0, c] = weight @ prototype + biases[c] + strength / 2 * difference @ covariance @ difference
        losses.append(cross_entropy(scale * logits, np.array([label]))[0])
    return float(np.mean(losses))


def frobenius_distance(previous: Array, current: Array, weights: Array) -> float:
    """The root of all squared differences of the rows that count."""
    total = 0.0
    for old, new, weight in zip(previous, current, weights, strict=True):
        total += float(np.sum((weight * (new - old)) ** 2))
    return float(np.sqrt(total))


def sigmoid(value: Array | float) -> Array:
    """1 / (1 + exp(-value))."""
    return 1.0 / (1.0 + np.exp(-np.asarray(value)))


def icarl_loss(logits: Array, labels: Labels, previous_logits: Array | None) -> float:
    """As published: one BCE with logits, mean over rows and seen classes; old columns have the old net's sigmoids."""
    num_rows, num_seen = logits.shape
    total = 0.0
    for i in range(num_rows):
        for c in range(num_seen):
            target = 1.0 if labels[i] == c else 0.0
            if previous_logits is not None and c < previous_logits.shape[1]:
                target = float(sigmoid(previous_logits[i, c]))
            probability = float(sigmoid(logits[i, c]))
            total -= target * np.log(probability) + (1 - target) * np.log(1 - probability)
    return total / (num_rows * num_seen)


def binary_cross_entropy(logits: Array, labels: Labels) -> Array:
    """The same without a previous network, one value a row."""
    return np.array([icarl_loss(logits[i : i + 1], labels[i : i + 1], None) for i in range(len(logits))])


def softened_cross_entropy(previous_logits: Array, logits: Array, temperature: float) -> float:
    """BiC's distillation: cross-entropy between softmaxes at a temperature, mean over rows."""
    losses = []
    for old, new in zip(previous_logits / temperature, logits / temperature, strict=True):
        targets = np.exp(old) / np.sum(np.exp(old))
        losses.append(-np.sum(targets * np.log(np.exp(new) / np.sum(np.exp(new)))))
    return float(np.mean(losses))


def softened_sigmoids(previous_logits: Array, logits: Array, temperature: float) -> float:
    """The distillation of PODNet's code base for BiC: one BCE for each row and old class, mean over all."""
    losses = []
    for old, new in zip(previous_logits.flatten(), logits.flatten(), strict=True):
        target, probability = float(sigmoid(old / temperature)), float(sigmoid(new / temperature))
        losses.append(-target * np.log(probability) - (1 - target) * np.log(1 - probability))
    return float(np.mean(losses))


def normalised_scores(scores: Array, eps: float = 1e-6) -> Array:
    """Each column less its mean, divided by its deviation over the rows: a batch norm that has just begun."""
    return (scores - scores.mean(axis=0)) / np.sqrt(scores.var(axis=0) + eps)


def random_features(embeddings: Array, projection: Array) -> Array:
    """RanPAC's and ACIL's h = relu(f W), one row per image."""
    return np.maximum(embeddings @ projection, 0.0)


def one_hot(labels: Labels, num_classes: int) -> Array:
    """A row per label with 1 at its place."""
    return np.eye(num_classes)[labels]


def ridge_weights(features: Array, targets: Array, ridge: float) -> Array:
    """The minimum over W (M, C) of |features W - targets|^2 + ridge |W|^2, by its normal equations."""
    return np.linalg.solve(features.T @ features + ridge * np.eye(features.shape[1]), features.T @ targets)


def ranpac_ridge(features: Array, targets: Array) -> float:
    """RanPAC's choice: fitted to the first 80 % of the rows, 10^-8, ..., 10^8 compared by MSE on the others."""
    cut = int(0.8 * len(features))
    errors = {}
    for power in range(-8, 9):
        weights = ridge_weights(features[:cut], targets[:cut], 10.0**power)
        errors[10.0**power] = float(np.mean((features[cut:] @ weights - targets[cut:]) ** 2))
    return min(errors, key=lambda ridge: errors[ridge])


def acil_recursion(batches: list[tuple[Array, Array]], size: int, ridge: float) -> Array:
    """ACIL's weights (M, C): R <- R - R X' (I + X R X')^-1 X R and W <- W + R X' (Y - X W), batch by batch."""
    inverse, weights = np.eye(size) / ridge, np.zeros((size, batches[0][1].shape[1]))
    for features, targets in batches:
        gain = np.linalg.inv(np.eye(len(features)) + features @ inverse @ features.T)
        inverse = inverse - inverse @ features.T @ gain @ features @ inverse
        weights = weights + inverse @ features.T @ (targets - features @ weights)
    return weights


def class_means(embeddings: Array, labels: Labels) -> Array:
    """The mean of each class's rows."""
    return np.stack([embeddings[labels == label].mean(axis=0) for label in range(labels.max() + 1)])


def slda_scores(embeddings: Array, means: Array, covariance: Array, shrinkage: float) -> Array:
    """SLDA's f' P mu_c - mu_c' P mu_c / 2, where P is the inverse of (1 - shrinkage) S + shrinkage I."""
    precision = np.linalg.pinv((1 - shrinkage) * covariance + shrinkage * np.eye(len(covariance)))
    return embeddings @ precision @ means.T - 0.5 * np.einsum("cd,de,ce->c", means, precision, means)


def slda_stream(covariance: Array, embeddings: Array, labels: Labels, num_classes: int) -> tuple[Array, Array]:
    """SLDA's updates, image by image: the means and S, where S starts as given, as that of no image."""
    means, counts = np.zeros((num_classes, embeddings.shape[1])), np.zeros(num_classes)
    for number, (image, label) in enumerate(zip(embeddings, labels, strict=True)):
        apart = image - means[label]
        covariance = (number * covariance + number / (number + 1) * np.outer(apart, apart)) / (number + 1)
        means[label] += apart / (counts[label] + 1)
        counts[label] += 1
    return means, covariance


def fecam_distances(
    test: Array,
    embeddings: Array,
    labels: Labels,
    power: float = 0.5,
    common: bool = False,
    alphas: tuple[float, float] = (1.0, 1.0),
) -> Array:
    """FeCAM's squared Mahalanobis distances (test images, classes), of features that are not negative."""

    def unit(vector: Array) -> Array:
        return vector / np.linalg.norm(vector)

    def shrunk(covariance: Array) -> Array:
        eye = np.eye(len(covariance))
        others = covariance[(1 - eye) * covariance != 0]
        return covariance + alphas[0] * np.diag(covariance).mean() * eye + alphas[1] * others.mean() * (1 - eye)

    found = np.zeros((len(test), labels.max() + 1))
    covariances = [np.cov((embeddings[labels == label] ** power).T) for label in range(found.shape[1])]
    if common:
        freedom = np.bincount(labels) - 1
        covariances = [np.average(covariances, axis=0, weights=freedom)] * len(covariances)
    for label, covariance in enumerate(covariances):
        twice = shrunk(shrunk(covariance))
        deviations = np.sqrt(np.diag(twice))
        inverse = np.linalg.pinv(twice / np.outer(deviations, deviations))
        mean = unit(embeddings[labels == label].mean(axis=0) ** power)
        for row, image in enumerate(test):
            apart = unit(unit(image) ** power) - mean
            found[row, label] = apart @ inverse @ apart
    return found


def fecam_distances_of_units(test: Array, embeddings: Array, labels: Labels, alpha1: float) -> Array:
    """FeCAM's distances for transformers: unit features, one shrinkage of variances, plain means, no Tukey."""
    units, test = (rows / np.linalg.norm(rows, axis=1)[:, None] for rows in (embeddings, test))
    found = np.zeros((len(test), labels.max() + 1))
    for label in range(found.shape[1]):
        own = units[labels == label]
        covariance = np.cov(own.T)
        covariance += alpha1 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
        deviations = np.sqrt(np.diag(covariance))
        inverse = np.linalg.pinv(covariance / np.outer(deviations, deviations))
        found[:, label] = [(row - own.mean(axis=0)) @ inverse @ (row - own.mean(axis=0)) for row in test]
    return found


def translated(features: list[Array], old_means: Array) -> list[Array]:
    """FeTrIL's pseudo-features of each old class: those of the new class of the most similar mean, moved to its own."""
    found = []
    for old in old_means:
        new_means = [np.mean(rows, axis=0) for rows in features]
        cosines = [np.sum(old * new) / np.sqrt(np.sum(old**2) * np.sum(new**2)) for new in new_means]
        nearest = int(np.argmax(cosines))
        found.append(np.array([row - new_means[nearest] + old for row in features[nearest]]))
    return found


def aligned_weights(weights: Array, num_old: int) -> Array:
    """WA's: the new classes' rows times the old rows' mean norm over their own, at most 1; rows without bias."""
    norms = [float(np.sqrt(np.sum(row**2))) for row in weights]
    gamma = min(np.mean(norms[:num_old]) / np.mean(norms[num_old:]), 1.0)
    return np.array([row if c < num_old else gamma * row for c, row in enumerate(weights)])


def separate_cross_entropy(logits: Array, labels: Labels, num_old: int) -> Array:
    """-log softmax_y over the new classes for a row of a new class, and over the old ones for one of an old class."""
    losses = []
    for row, label in zip(logits, labels, strict=True):
        competing = row[:num_old] if label < num_old else row[num_old:]
        losses.append(np.log(np.sum(np.exp(competing))) - row[label])
    return np.array(losses)


def linear_gradient(features: Array, logits: Array, labels: Labels) -> Array:
    """d mean cross-entropy / d W (classes, dim + 1) of logits = W [f, 1]: the mean of (p - y) [f, 1]'."""
    probabilities = np.exp(logits) / np.sum(np.exp(logits), axis=1, keepdims=True)
    errors = probabilities - one_hot(labels, logits.shape[1])
    return errors.T @ np.concatenate([features, np.ones((len(features), 1))], axis=1) / len(features)


def fisher(gradients: list[Array], largest: float) -> Array:
    """EWC's diagonal in PyCIL: the mean over batches of the squared gradient, at most `largest`."""
    return np.minimum(np.mean([gradient**2 for gradient in gradients], axis=0), largest)


def merged_fisher(earlier: Array, new: Array, num_old: int, num_seen: int) -> Array:
    """PyCIL's: the earlier one's share is old / seen; what has no earlier one is the new one's."""
    alpha, merged = num_old / num_seen, new.copy()
    merged[: len(earlier)] = alpha * earlier + (1 - alpha) * new[: len(earlier)]
    return merged


def elastic_penalty(fisher: Array, parameters: Array, previous: Array, weight: float) -> float:
    """weight * sum_i F_i (theta_i - theta'_i)^2 / 2 over the parameters that have an F."""
    total = 0.0
    for importance, now, before in zip(fisher, parameters[: len(fisher)], previous, strict=True):
        total += importance * (now - before) ** 2 / 2
    return float(weight * total)


def der_auxiliary(features: Array, labels: Labels, weights: Array, num_old: int) -> float:
    """DER's auxiliary loss: the newest branch's features, where all old classes are class 0."""
    losses = []
    for feature, label in zip(features, labels, strict=True):
        target = 0 if label < num_old else int(label) - num_old + 1
        logits = np.array([float(row @ feature) for row in weights])
        losses.append(float(np.log(np.exp(logits).sum()) - logits[target]))
    return sum(losses) / len(losses)


def effective_number_weights(counts: list[int], beta: float) -> Array:
    """FOSTER's weights of classes: the inverse of the effective number of images, with a mean of 1."""
    weights = np.array([(1 - beta) / (1 - beta**count) for count in counts])
    return weights / weights.sum() * len(counts)


def balanced_distillation(teacher: Array, student: Array, weights: Array, temperature: float) -> float:
    """FOSTER's compression: cross-entropy to the teacher's softened probabilities, weighted by class."""
    losses = []
    for taught, own in zip(teacher, student, strict=True):
        targets = np.exp(taught / temperature) * weights
        targets = targets / targets.sum()
        scaled = own / temperature
        losses.append(-float((targets * (scaled - np.log(np.exp(scaled).sum()))).sum()))
    return sum(losses) / len(losses)
