"""Data: labelled images, where they come from, class orders, stages and transforms."""

from ccfa.data.cache import cache_folder
from ccfa.data.cifar100 import CIFAR100_PODNET, CIFAR100_UCIR, CIFAR100_UNJITTERED
from ccfa.data.decoding import Framing, decode_bytes, decode_files, decode_image, frame
from ccfa.data.embedded import DIGITS, GLYPHS, load_digits_images, load_glyphs
from ccfa.data.folder import FOLDER, Photos, find_images, image_digests, inspect_folder, read_photos
from ccfa.data.imagenet import IMAGENET, ClassList, class_list, described_list, find_photos, prepared_folder
from ccfa.data.images import ImageSet
from ccfa.data.prepared import Preparation, read_prepared
from ccfa.data.registry import DATASETS, Loader, data_set, describe_data_sets, load, load_parts, register_data
from ccfa.data.stages import Stage, class_order, order_names, parse_scenario, read_order, recognise_imagenet, split
from ccfa.data.streamed import Streamed
from ccfa.data.transforms import Transforms

__all__ = [
    "CIFAR100_PODNET",
    "CIFAR100_UCIR",
    "CIFAR100_UNJITTERED",
    "DATASETS",
    "DIGITS",
    "FOLDER",
    "GLYPHS",
    "IMAGENET",
    "ClassList",
    "Framing",
    "ImageSet",
    "Loader",
    "Photos",
    "Preparation",
    "Stage",
    "Streamed",
    "Transforms",
    "cache_folder",
    "class_list",
    "class_order",
    "data_set",
    "decode_bytes",
    "decode_files",
    "decode_image",
    "describe_data_sets",
    "described_list",
    "find_images",
    "find_photos",
    "frame",
    "image_digests",
    "inspect_folder",
    "load",
    "load_digits_images",
    "load_glyphs",
    "load_parts",
    "order_names",
    "parse_scenario",
    "prepared_folder",
    "read_order",
    "read_photos",
    "read_prepared",
    "recognise_imagenet",
    "register_data",
    "split",
]
