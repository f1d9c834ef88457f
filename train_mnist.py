"""Train a small CNN on MNIST and watch it in TensorBoard: ``python train_mnist.py --help``.

The training loop is a usual one. Telemetry adds ``with HookLogger(...)`` around it, and
``logger.log`` for curves that only the loop knows. ``--fault`` breaks the training on purpose, to
show the alerts.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections import OrderedDict
from pathlib import Path
from urllib.parse import quote

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import MNIST
from tqdm import tqdm

from telemetry import HookLogger
from telemetry.run.files import tensorboard_command

FAULTS = (
    "none", "exploding", "vanishing", "nonfinite", "dead", "saturated", "lr_too_high", "lr_too_low",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    data_name, train_set, test_set = load_data(args.data)
    batches = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)

    model = build_model(args.fault).to(device)
    lr = args.lr * {"lr_too_high": 1000, "lr_too_low": 1e-6}.get(args.fault, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    fault = "" if args.fault == "none" else f"-{args.fault}"
    log_dir = args.log_dir or f"runs/{data_name}{fault}-{time.strftime('%Y%m%d-%H%M%S')}"
    with HookLogger(model, log_dir, every_n_steps=args.every_n_steps) as logger:
        described = {"data": data_name, "fault": args.fault, "lr": lr, "seed": args.seed}
        logger.hparams({**described, "batch_size": args.batch_size})
        for epoch in range(args.epochs):
            model.train()
            progress = tqdm(batches, desc=f"epoch {epoch + 1}/{args.epochs}", unit="batch")
            for images, labels in progress:
                images, labels = images.to(device), labels.to(device)
                if args.fault == "nonfinite" and logger.current_step == args.every_n_steps:
                    images = images / 0  # one bad batch

                logits = model(images)
                loss = nn.functional.cross_entropy(logits, labels)
                logger.log(loss=loss, accuracy=(logits.argmax(1) == labels).float().mean())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

            logger.log(test_accuracy=accuracy(model, test_set, device))

    print(f"\ntraining accuracy {accuracy(model, train_set, device):.2%}")
    print(f"test accuracy     {accuracy(model, test_set, device):.2%}")
    print(f"alerts            {len(logger.alerts) or 'none'}")
    for alert in logger.alerts:
        print(f"  {alert.title}: {alert.added or alert.summary}")
    page = f"http://localhost:6006/#telemetry&p.telemetry.run={quote(Path(log_dir).name, safe='')}"
    print(
        f"\nOpen it with:\n{tensorboard_command(log_dir)} --port 6006\n  layers over steps: {page}"
    )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small CNN on MNIST and watch it in TensorBoard.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--data", type=Path, default="data", help="folder of the MNIST images")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training set")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step")
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate of SGD")
    parser.add_argument(
        "--every-n-steps", type=int, default=50, help="measure in full every N steps"
    )
    parser.add_argument(
        "--log-dir", help="folder for TensorBoard; by default, data, fault and time in runs/"
    )
    parser.add_argument("--device", default=device, help="where to train")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--fault", choices=FAULTS, default="none", help="break the training")
    return parser.parse_args(arguments)


def load_data(folder: Path) -> tuple[str, TensorDataset, TensorDataset]:
    """Name, training and test set; scikit-learn's digits if MNIST cannot be downloaded."""
    socket.setdefaulttimeout(10)  # torchvision would wait forever for a silent server
    try:
        train, test = (MNIST(folder, train=train, download=True) for train in (True, False))
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].rstrip(":")
        print(f"No MNIST ({reason}); training on scikit-learn's 8×8 digits, enlarged, instead.")
        return load_small_digits()
    return "mnist", as_dataset(train.data, train.targets), as_dataset(test.data, test.targets)


def load_small_digits() -> tuple[str, TensorDataset, TensorDataset]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.from_numpy(digits.images).float()[:, None] * (255 / 16)
    images = nn.functional.interpolate(small, size=(28, 28), mode="bilinear")[:, 0]
    labels = torch.from_numpy(digits.target)
    # The data set is ordered by writer: without shuffling, no writer is in both parts.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = (as_dataset(images[part], labels[part]) for part in (order[:1437], order[1437:]))
    return "digits", train, test


def as_dataset(images: Tensor, labels: Tensor) -> TensorDataset:
    """Gray levels 0 to 255, ``[N, 28, 28]``, normalized by MNIST's mean and deviation."""
    return TensorDataset((images[:, None].float() / 255 - 0.1307) / 0.3081, labels)


def build_model(fault: str) -> nn.Module:
    """A small CNN; some faults are built into it."""
    activation = {"vanishing": nn.Sigmoid, "saturated": nn.Tanh}.get(fault, nn.ReLU)
    hidden = [nn.Linear(32 * 5 * 5, 64), activation()]
    if fault in ("exploding", "vanishing"):  # ten layers multiply what one does
        hidden += [layer for _ in range(10) for layer in (nn.Linear(64, 64), activation())]
    model = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, kernel_size=3), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 32, kernel_size=3), relu2=nn.ReLU(), pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(), hidden=nn.Sequential(*hidden), output=nn.Linear(64, 10),
        )
    )  # fmt: skip
    first, *further = (layer for layer in hidden if isinstance(layer, nn.Linear))
    with torch.no_grad():
        if fault == "exploding":  # weights too large
            for layer in further:
                layer.weight.mul_(7)
        if fault == "saturated":
            first.weight.mul_(1000)
        if fault == "dead":  # a ReLU that never opens
            first.bias.fill_(-100)
    return model


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset, device: torch.device) -> float:
    """Share of correct predictions, 0 to 1."""
    model.eval()
    right = [
        model(images.to(device)).argmax(dim=1).cpu() == labels
        for images, labels in DataLoader(dataset, batch_size=500)
    ]
    return torch.cat(right).float().mean().item()


if __name__ == "__main__":
    main()
