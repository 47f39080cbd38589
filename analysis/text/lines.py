"""Draws lines of text with Debian's fonts, and decodes a recognizer's output."""

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

# Height and smallest width of a recognizer's input, in pixels.
HEIGHT, WIDTH = 48, 320


@dataclass(frozen=True)
class Line:
    """A drawn line: its text, and the image (3, 48, width) as PP-OCR takes it, BGR in [-1, 1]."""

    text: str
    image: np.ndarray


def lines(count: int, *, seed: int, fonts: Path) -> list[Line]:
    """Draw lines: of four, two are English (the texts of Python's own help), one numbers, one Chinese.

    Chinese lines are common characters of GB 2312 (level 1) in random order.

    Raises:
        FileNotFoundError: a font is missing; Debian has them in fonts-dejavu-core, fonts-liberation, fonts-noto-cjk.
    """
    latin, chinese = _fonts(fonts)
    draw, words = random.Random(seed), _words()
    found = []
    for i in range(count):
        kind = i % 4
        if kind == 3:
            text = "".join(_common(draw) for _ in range(draw.randint(5, 16)))
        elif kind == 2:
            text = _numbers(draw)
        else:
            start = draw.randrange(len(words) - 8)
            text = " ".join(words[start : start + draw.randint(2, 6)])
        found.append(Line(text, _drawn(text, draw.choice(chinese if kind == 3 else latin), draw)))
    return found


def _words() -> list[str]:
    from pydoc_data.topics import topics  # lazy: 700 kB of text

    kept = (word for topic in sorted(topics) for word in topics[topic].split())
    return [word for word in kept if word.isascii() and word.strip(".,;:()").isalpha()]


def _common(draw: random.Random) -> str:
    return bytes([draw.randrange(0xB0, 0xD7), draw.randrange(0xA1, 0xFF)]).decode("gb2312")


def _numbers(draw: random.Random) -> str:
    n = draw.randrange
    return draw.choice(
        (
            f"{n(1990, 2027)}-{n(1, 13):02d}-{n(1, 29):02d} {n(24):02d}:{n(60):02d}",
            f"No. {n(10**6, 10**9)}",
            f"${n(1, 99)},{n(1000):03d}.{n(100):02d}",
            f"+{n(1, 99)} {n(100, 999)} {n(100, 999)} {n(1000, 9999)}",
            f"{n(100)}.{n(10)}% ({n(1000)}/{n(1000, 9999)})",
        )
    )


def _fonts(folder: Path) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    """(Latin fonts, Chinese fonts), each with its number in the file."""
    latin = [(p, 0) for form in ("DejaVuSans*.ttf", "DejaVuSerif*.ttf", "Liberation*.ttf") for p in folder.rglob(form)]
    chinese = [(p, 2) for p in folder.rglob("Noto*CJK-*.ttc")]  # 2: simplified Chinese
    for found, package in ((latin, "fonts-dejavu-core fonts-liberation"), (chinese, "fonts-noto-cjk")):
        if not found:
            raise FileNotFoundError(f"no font of {package} below {folder}; apt-get install {package}")
    return sorted(latin), sorted(chinese)


def _drawn(text: str, font: tuple[Path, int], draw: random.Random) -> np.ndarray:
    face = ImageFont.truetype(str(font[0]), draw.randint(24, 44), index=font[1])
    left, top, right, bottom = face.getbbox(text)
    margin = draw.randint(4, 12)
    image = Image.new("L", (int(right - left) + 2 * margin, int(bottom - top) + 2 * margin), draw.randint(190, 255))
    ImageDraw.Draw(image).text((margin - left, margin - top), text, font=face, fill=draw.randint(0, 90))
    image = image.rotate(draw.uniform(-1, 1), Image.Resampling.BICUBIC, fillcolor=image.getpixel((0, 0)))
    image = image.filter(ImageFilter.GaussianBlur(draw.uniform(0, 1.2)))
    values = np.asarray(image, np.float32)
    noise = np.random.default_rng(draw.randrange(2**32)).normal(0, draw.uniform(0, 12), values.shape)
    memory = io.BytesIO()
    Image.fromarray((values + noise).clip(0, 255).astype(np.uint8)).save(memory, "JPEG", quality=draw.randint(50, 95))
    return _prepared(Image.open(memory).convert("RGB"))


def _prepared(image: Image.Image) -> np.ndarray:
    """PP-OCR's preprocessing: 48 pixels high, the width in proportion, zeros to the right up to the least width."""
    width = max(1, round(HEIGHT * image.width / image.height))
    values = np.asarray(image.resize((width, HEIGHT), Image.Resampling.BILINEAR), np.float32)[..., ::-1]
    padded = np.zeros((3, HEIGHT, max(WIDTH, width)), np.float32)
    padded[:, :, :width] = values.transpose(2, 0, 1) / 127.5 - 1
    return padded


def decode(scores: np.ndarray, characters: Sequence[str]) -> str:
    """The best path of a CTC output (steps, classes): repeats are one, class 0 is the blank."""
    best = scores.argmax(-1)
    kept = best[(best != 0) & (np.diff(best, prepend=0) != 0)]
    return "".join(characters[i - 1] for i in kept)
