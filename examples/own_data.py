"""Your own model and your own data: three hospitals train together, and none of them sends an image.

Run it with: python examples/own_data.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import fedgist


class Net(nn.Module):
    """Any module that turns images into class scores will do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def main() -> None:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # [samples, channels, height, width]
    labels = torch.tensor(digits.target)  # whole numbers from 0

    # Each hospital saw other classes: 0 to 3, 3 to 6, 6 to 9. The last 300 images are for testing.
    x, y = images[:-300], labels[:-300]
    hospitals = [(x[chosen], y[chosen]) for first in (0, 3, 6) for chosen in [(y >= first) & (y <= first + 3)]]

    torch.manual_seed(0)  # the weights that a module is made with are the start
    result = fedgist.run(
        "fedavg",
        model=Net(),
        data=hospitals,
        test=(images[-300:], labels[-300:]),
        rounds=10,
        epochs=1,
        lr=0.1,
        momentum=0.9,
    )
    print(f"accuracy {result.accuracy:.2f}, {result.bytes_up:,} bytes up, {result.bytes_down:,} bytes down")

    trained = Net()
    trained.load_state_dict(result.weights)


if __name__ == "__main__":
    main()
