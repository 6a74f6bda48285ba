"""One card for each known data set: all that is known of it before a file is read."""

from dataclasses import dataclass

CIFAR = "both archives are at https://www.cs.toronto.edu/~kriz/cifar.html"
EMNIST = "the four IDX files are in gzip.zip of https://www.nist.gov/itl/products-and-services/emnist-dataset"
EMNIST_FILES = ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")


@dataclass(frozen=True)
class Card:
    """A data set; one without a `source` comes with a package, all others lie in a folder of their name."""

    name: str
    what: str
    """What its images show."""
    shape: tuple[int, ...]
    """Channels, height and width of an image, or the columns of a table."""
    classes: int
    note: str
    """What its line ends with: where it is from."""
    sizes: tuple[int, int] | None = None
    """Train and test images, where that is the same for everybody."""
    mean: tuple[float, ...] = ()
    """Of each channel, as customary; those of the train set where nothing is."""
    deviation: tuple[float, ...] = ()
    files: str = ""
    """Its files as published, where their form is another than MNIST's."""
    source: str = ""
    """Where these are."""
    torchvision: str = ""
    """The class that downloads it."""
    names: tuple[str, ...] = ()
    """Of the classes, where they are more than numbers."""

    @property
    def line(self) -> str:
        counts = "" if self.sizes is None else f"{self.sizes[0]:,} + {self.sizes[1]:,} "
        if len(self.shape) == 1:
            return f"{counts}rows of {self.shape[0]} {self.what}, {self.classes} classes{self.note}"
        channels, height, width = self.shape
        colour = "grey" if channels == 1 else "colour"
        return f"{counts}{colour} {height}×{width} {self.what}, {self.classes} classes{self.note}"


def emnist_files(split: str) -> str:
    """The files of a split of EMNIST, in words."""
    return ", ".join(f"emnist-{split}-{part}-ubyte[.gz]" for part in EMNIST_FILES)


def _folder(paper: str) -> str:
    return f"; from a folder ({paper})"


ALL = (
    Card(
        "digits",
        "digits",
        (1, 8, 8),
        10,
        ", from scikit-learn; nothing to fetch",
        (1438, 359),
        mean=(0.30508613851703753,),
        deviation=(0.37586814511738453,),
    ),
    Card(
        "breast_cancer",
        "measurements of cell nuclei",
        (30,),
        2,
        ", from scikit-learn; nothing to fetch (Street et al. 1993)",
        (456, 113),
        names=("malignant", "benign"),
    ),
    Card(
        "wine",
        "measurements of wines",
        (13,),
        3,
        ", from scikit-learn; nothing to fetch (Aeberhard et al. 1992)",
        (142, 36),
        names=("class_0", "class_1", "class_2"),
    ),
    Card(
        "mnist5k",
        "digits of MNIST",
        (1, 28, 28),
        10,
        "; needs 'fedgist[demo]' or an export",
        (4000, 1000),
        mean=(0.1307,),
        deviation=(0.3081,),
    ),
    Card(
        "mnist",
        "digits",
        (1, 28, 28),
        10,
        _folder("LeCun et al. 1998"),
        (60_000, 10_000),
        mean=(0.1307,),
        deviation=(0.3081,),
        source="the four IDX files are those of http://yann.lecun.com/exdb/mnist",
        torchvision="MNIST",
    ),
    Card(
        "fashion-mnist",
        "pieces of clothing",
        (1, 28, 28),
        10,
        _folder("Xiao et al. 2017"),
        (60_000, 10_000),
        mean=(0.2860,),
        deviation=(0.3530,),
        source="the four IDX files are in https://github.com/zalandoresearch/fashion-mnist, folder data/fashion",
        torchvision="FashionMNIST",
        names=(
            *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
            *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
        ),
    ),
    Card(
        "cifar10",
        "images",
        (3, 32, 32),
        10,
        _folder("Krizhevsky 2009"),
        (50_000, 10_000),
        mean=(0.4914, 0.4822, 0.4465),
        deviation=(0.2023, 0.1994, 0.2010),  # the mean of the deviations of the images
        files="the folder cifar-10-batches-py with data_batch_1 to 5 and test_batch (or cifar-10-batches-bin)",
        source=CIFAR,
        torchvision="CIFAR10",
        names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    Card(
        "cifar100",
        "images",
        (3, 32, 32),
        100,
        _folder("Krizhevsky 2009"),
        (50_000, 10_000),
        mean=(0.5071, 0.4866, 0.4409),
        deviation=(0.2673, 0.2564, 0.2762),
        files="the folder cifar-100-python with train and test (or cifar-100-binary)",
        source=CIFAR,
        torchvision="CIFAR100",
    ),
    Card(
        "emnist-letters",
        "letters",
        (1, 28, 28),
        26,
        _folder("Cohen et al. 2017"),
        (124_800, 20_800),
        files=emnist_files("letters"),
        source=EMNIST,
        names=tuple("abcdefghijklmnopqrstuvwxyz"),
    ),
    Card(
        "emnist-byclass",
        "digits and letters",
        (1, 28, 28),
        62,
        _folder("Cohen et al. 2017"),
        (697_932, 116_323),
        files=emnist_files("byclass"),
        source=EMNIST,
    ),
    Card(
        "pathmnist",
        "tissue images",
        (3, 28, 28),
        9,
        _folder("Yang et al. 2023"),
        (89_996, 7_180),
        files="pathmnist.npz",
        source="pathmnist.npz is at https://medmnist.com",
        names=(
            *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa"),
            *("cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
        ),
    ),
    Card(
        "femnist",
        "digits and letters by writer",
        (1, 28, 28),
        62,
        _folder("LEAF, Caldas et al. 2018"),
        files="train/*.json and test/*.json",
        source="https://leaf.cmu.edu makes the JSON files",
    ),
    Card(
        "celeba",
        "faces by person",
        (3, 84, 84),
        2,
        ": smiling or not" + _folder("LEAF, Caldas et al. 2018"),
        files="train/*.json and test/*.json",
        source="https://leaf.cmu.edu makes the JSON files; the pictures go into images/",
        names=("not smiling", "smiling"),
    ),
)
CARDS = {card.name: card for card in ALL}
