"""Fifteen families of drawn pictures, none of `mini`, on which the embedded backbones are trained.

A family is a function of its traits, (n, 1, 1) arrays in [0, 1), which determine the class; random
draws from the canvas differ between pictures of one class.  Each class is a random point of its
family's traits.  There is no font, digit or photograph; no family is in a dataset of the benchmark
(though both use the functions `rosette` and `pattern`), and nothing of the benchmark is read here.
"""

import inspect
import zlib

import numpy as np
from draw import Canvas, box, capsule, ellipse, hsv, lit, pattern, polygon, rosette, turned, warp

FAMILIES = {}  # name -> what paints it, and its number of traits


def family(traits=None, bare=False, clutter=4, **pose):
    """Register a painting function as a family: pictures with a scene and partly covered objects.

    A `bare` function paints its own scene.
    """

    def register(paint):
        def picture(rng, *levels):
            c = Canvas(rng, len(levels[0]), **pose)
            if not bare:
                c.scene(clutter=clutter)
            paint(c, *levels)
            c.veil()
            return c.develop()

        FAMILIES[paint.__name__] = picture, traits or len(inspect.signature(paint).parameters) - 1
        return paint

    return register


def printed(shape, *motif):
    """The part of a shape that a pattern covers; the fifth kind is plain."""
    x, y, kind, *rest = motif
    return np.where(kind == 4, 9.0, np.maximum(shape, pattern(x, y, np.minimum(kind, 3), *rest)))


def step(trait, levels):
    """The trait in whole numbers, 0 to levels - 1."""
    return np.floor(trait * levels).astype(int)


@family(turn=0.5, mirror=False)
def emblems(c, corners, depth, aspect, hue, print_hue, motif, period):
    x, y = c.x * (0.8 + 0.8 * aspect), c.y
    shape = rosette(x, y, 2 + step(corners, 6), 0.75 - 0.55 * depth, 0.9, 0.5 + 2 * depth)
    dye, ink = (
        hsv(h + c.any(-0.03, 0.03), c.any(0.5, 0.9), c.any(0.4, 1)) for h in (hue, print_hue)
    )
    c.paint(shape, dye)
    c.paint(printed(shape, x, y, step(motif, 5), 2.4 * hue, 0.25 + 0.4 * period, 0.45), ink)


@family(bare=True, turn=0.4)
def fish(c, length, height, tail, fin, bars, eye, snout):
    c.scene(c.colour(hue=(0.4, 0.7)), c.colour())
    x, y, long, high = c.x, c.y, 0.45 + 0.3 * length, 0.15 + 0.35 * height
    coat, mark = c.two()
    fork = 0.15 + 0.35 * tail
    end = (-long - 0.25, fork), (-long - 0.3 * tail, 0.0), (-long - 0.25, -fork)
    c.outlined(polygon(x, y, (-long + 0.15, 0.0), *end), coat, mark)
    c.paint(
        polygon(x, y, (-0.3, 0.0), (0.3 - 0.5 * fin, high + 0.1 + 0.25 * fin), (0.3, 0.0)), mark
    )
    body = np.minimum(
        ellipse(x, y, long, high), ellipse(x - long * 0.75, y, 0.15 + 0.2 * snout, 0.1 + 0.3 * high)
    )
    c.outlined(body, coat, mark)
    gap = 0.12 + 0.12 * step(bars, 4)
    c.paint(
        np.maximum(body + 0.02, np.abs((x + 0.1) / gap - np.round((x + 0.1) / gap)) * gap - 0.035),
        mark,
    )
    c.paint(np.hypot(x - 0.65 * long, y - 0.08) - 0.04 - 0.07 * eye, 0.95)
    c.paint(np.hypot(x - 0.65 * long, y - 0.08) - 0.02 - 0.03 * eye, 0.05)


@family(turn=np.pi)
def insects(c, segments, legs, span, chord, horn, spots, hue, wing_hue):
    x, y = np.abs(c.x), c.y
    for number in range(4):
        at = 0.35 - 0.25 * number
        leg = capsule(x, y, (0.0, at), (0.55, at + 0.25 - 0.2 * number), 0.03, 0.02)
        c.paint(np.where(number < 1 + step(legs, 4), leg, 9.0), 0.1)
    c.paint(capsule(x, y, (0.05, 0.6), (0.1 + 0.3 * horn, 0.95), 0.025, 0.025), 0.1)
    wing = ellipse(
        *turned(x, y, 0.5 - 0.9 * chord, (0.35 + 0.2 * span, 0.1)),
        0.25 + 0.2 * span,
        0.1 + 0.15 * chord,
    )
    c.outlined(wing, hsv(wing_hue, c.any(0.4, 0.8), c.any(0.5, 1)), 0.2)
    coat = hsv(hue, c.any(0.5, 0.9), c.any(0.4, 0.9))
    body = np.minimum(
        ellipse(x, y + 0.3, 0.16 + 0.12 * segments, 0.45), ellipse(x, y - 0.3, 0.18, 0.2)
    )
    c.outlined(np.minimum(body, np.hypot(x, y - 0.55) - 0.15), coat, 0.1)
    c.paint(printed(body, c.x, y, step(spots, 3), np.pi / 2, 0.2, 0.45), coat * 0.4)


@family(turn=0.2)
def beasts(c, legs, length, neck, head, tail, ears, coat):
    x, y, low, half = c.x, c.y + 0.1, -0.35 - 0.4 * legs, 0.3 + 0.25 * length
    fur, mark = c.two()
    stride = c.any(-0.15, 0.15)
    for side in (-1, -0.65, 0.65, 1):
        hip = side * half * 0.85
        c.paint(
            capsule(x, y, (hip, -0.1), (hip + stride * np.sign(side), low), 0.08, 0.05), fur * 0.8
        )
    c.paint(
        capsule(
            x, y, (-half, 0.1), (-half - 0.2, 0.1 + 0.5 * (tail - 0.5)), 0.05, 0.05 + 0.06 * tail
        ),
        fur,
    )
    top = half + 0.1 + 0.15 * neck, 0.3 + 0.45 * neck
    trunk = np.minimum(
        box(x, y, half + 0.05, 0.22, 0.15), capsule(x, y, (half - 0.1, 0.1), top, 0.15, 0.1)
    )
    c.paint(trunk, fur)
    c.paint(printed(trunk, x, y, step(coat, 5), 0.0, 0.22, 0.5), mark)
    c.paint(capsule(x, y, top, (top[0] + 0.1 + 0.2 * head, top[1] - 0.05), 0.13, 0.1), fur)
    ear = (
        (top[0] - 0.1, top[1]),
        (top[0] - 0.1, top[1] + 0.15 + 0.25 * ears),
        (top[0] + 0.08, top[1]),
    )
    c.paint(polygon(x, y, *ear), mark)


@family(turn=0.2)
def cups(c, height, taper, handle, band, place, foot):
    x, y, high, top = c.x, c.y, 0.3 + 0.4 * height, 0.35 + 0.25 * taper
    low = 0.6 - 0.4 * taper
    glaze, mark = c.two()
    ring = (
        np.abs(ellipse(x - (top + low) / 2, y, 0.15 + 0.2 * handle, 0.2 + 0.25 * (1 - handle)))
        - 0.05
    )
    c.outlined(ring, glaze, mark * 0.6)
    body = polygon(x, y, (-top, high), (top, high), (low, -high), (-low, -high))
    c.outlined(
        np.minimum(body, box(x, y + high, low * (0.6 + 0.8 * foot), 0.06)), glaze, mark * 0.6
    )
    strip = np.abs(y - high * (place - 0.5)) - 0.06 - 0.2 * band
    c.paint(
        printed(np.maximum(body, strip), x, y, step(place * 7 % 1, 4), 0.8 * band, 0.2, 0.5), mark
    )
    c.outlined(ellipse(x, y - high, top, 0.08), glaze * 0.5, mark * 0.6)


@family(turn=0.1)
def houses(c, width, storeys, pitch, windows, door, chimney, roof_hue):
    x, y, half, top = c.x, c.y + 0.2, 0.35 + 0.35 * width, -0.1 + 0.4 * storeys
    wall, dark = c.two()
    tiles = hsv(roof_hue, c.any(0.4, 0.8), c.any(0.3, 0.9))
    c.paint(box(x - half * (1.4 * chimney - 0.7), y - top - 0.3, 0.08, 0.2 + 0.1 * pitch), dark)
    eaves = np.where(pitch < 0.25, half * 0.9, half * 0.05 * (pitch < 0.7))
    ridge = top + 0.15 + 0.5 * pitch
    roof = (-half - 0.1, top), (half + 0.1, top), (eaves, ridge), (-eaves, ridge)
    c.outlined(polygon(x, y, *roof), tiles, 0.2)
    front = box(x, (y - (top - 0.7) / 2), half, (top + 0.7) / 2)
    c.outlined(front, wall, 0.2)
    count = 2 + step(windows, 4)
    pane = 2 * half / count
    grid = box(
        (x / pane - np.floor(x / pane) - 0.5) * pane, (y - top) % 0.35 - 0.175, 0.3 * pane, 0.1
    )
    c.paint(np.maximum(np.maximum(front + 0.04, grid), -0.35 - y), dark)
    c.paint(box(x - half * (1.4 * door - 0.7), y + 0.55, 0.1, 0.16), tiles * 0.6)


@family(turn=0.12)
def trees(c, kind, width, trunk, lean, tiers, fruit, hue):
    x, y, wide, low = (
        c.x - 0.3 * (lean - 0.5) * (c.y + 0.9),
        c.y,
        0.3 + 0.4 * width,
        -0.5 + 0.5 * trunk,
    )
    wood = hsv(c.any(0.05, 0.12), 0.5, c.any(0.2, 0.5))
    c.paint(capsule(x, y, (0.0, -0.95), (0.0, low + 0.3), 0.07 + 0.1 * (1 - trunk), 0.05), wood)
    green = hsv(0.12 + 0.3 * hue + c.any(-0.03, 0.03), c.any(0.4, 0.9), c.any(0.3, 0.9))
    high, rows = 0.95 - low, 1 + step(tiers, 4)
    rise = np.clip((y - low) / high, 0, 1) * rows
    saw = np.abs(x) - wide * (1 - rise / rows * 0.7) * (1.1 - (rise - np.floor(rise)))
    conifer = np.maximum(saw * 0.7, np.abs(y - low - high / 2) - high / 2)
    round_ = ellipse(x, y - low - high / 2, wide, high / 2) + 0.04 * np.sin(9 * x * rows) * np.sin(
        9 * y
    )
    right = ellipse(x - 0.3, y - low - high * 0.4, wide * 0.6, high * 0.35)
    left = ellipse(x + 0.25, y - low - high * 0.65, wide * 0.6, high * 0.35)
    crown = np.choose(step(kind, 3), [conifer, round_, np.minimum(right, left)])
    c.outlined(crown, green, green * 0.5)
    dots = printed(crown + 0.05, x, y, np.where(fruit > 0.4, 2, 4), 0.6, 0.3, 0.15 + 0.3 * fruit)
    c.paint(dots, c.colour((0.6, 1), (0.5, 1)))


@family(turn=np.pi)
def keys(c, bow, size, length, teeth, depth, hole, rhythm):
    x, y, r = c.x, c.y, 0.2 + 0.15 * size
    metal, ink = c.two()
    end = 0.2 + 0.65 * length
    head = rosette(x + 0.55, y, 1 + step(bow, 5), r * (0.6 + 0.4 * size), r * 1.25, 0.8)
    shape = np.minimum(head, box(x - (end - 0.5) / 2, y, (end + 0.5) / 2, 0.055))
    for number in range(4):
        reach = 0.08 + 0.22 * np.abs(np.sin(9.0 * rhythm + 2.3 * number)) * (0.5 + depth)
        tooth = box(x - end + 0.06 + 0.15 * number, y + reach, 0.045, reach)
        shape = np.minimum(shape, np.where(number < 1 + step(teeth, 4), tooth, 9.0))
    c.outlined(np.maximum(shape, 0.05 + 0.15 * hole - np.hypot(x + 0.55, y)), metal, ink)


@family(turn=0.5, zoom=(0.5, 0.95), shift=0.3)
def fruit(c, aspect, waist, hue, second, stalk, leaf, spots):
    x, y = c.x * (0.75 + 0.6 * aspect), c.y
    skin, blush = (
        hsv(h + c.any(-0.02, 0.02), c.any(0.6, 0.95), c.any(0.5, 1)) for h in (hue, second)
    )
    c.paint(capsule(x, y, (0.0, 0.4), (0.2 * (stalk - 0.5), 0.6 + 0.35 * stalk), 0.04, 0.04), 0.2)
    c.paint(
        ellipse(*turned(x, y, 0.5, (0.2, 0.75)), 0.05 + 0.25 * leaf, 0.03 + 0.1 * leaf),
        c.colour(hue=(0.2, 0.4)),
    )
    flesh = np.minimum(np.hypot(x, y + 0.15) - 0.55, np.hypot(x, y - 0.25) - 0.2 - 0.35 * waist)
    c.outlined(flesh, skin, skin * 0.5)
    c.paint(np.maximum(flesh, np.hypot(x - 0.3, y - 0.2) - 0.2 - 0.4 * leaf), blush, 0.8)
    dots = printed(flesh + 0.05, x, y, np.where(spots > 0.4, 2, 4), 0.5, 0.22, 0.2 + 0.3 * spots)
    c.paint(dots, skin * 0.4)
    c.paint(ellipse(x + 0.25, y - 0.15, 0.08, 0.14), 1.0, 0.6)


@family(clutter=6, turn=0.25, zoom=(0.45, 0.95), shift=0.3, squeeze=0.3)
def signs(c, form, border, hue, rim_hue, motif, share, bend):
    x, y = c.x, c.y
    c.paint(box(x, y + 1, 0.05, 1), 0.3)
    diamond, triangle = (
        (np.abs(x) + np.abs(y) - 0.9) * 0.7,
        polygon(x, y, (-0.85, -0.65), (0.85, -0.65), (0.0, 0.85)),
    )
    forms = [
        np.hypot(x, y) - 0.75,
        box(x, y, 0.7, 0.7),
        box(x, y, 0.85, 0.5, 0.15),
        diamond,
        triangle,
    ]
    face = np.choose(step(form, 5), forms)
    fill, rim = (
        hsv(h + c.any(-0.02, 0.02), c.any(0.6, 0.95), c.any(0.5, 1)) for h in (hue, rim_hue)
    )
    c.paint(face, rim)
    c.paint(face + 0.08 + 0.15 * border, fill)
    bent, inner = y + 0.5 * (bend - 0.5) * np.abs(x), face + 0.15 + 0.15 * border
    c.paint(printed(inner, x, bent, step(motif, 4), np.pi * share, 0.35 + 0.25 * bend, 0.4), rim)


@family(turn=0.3)
def masks(c, jaw, eyes, apart, slant, mouth, smile, nose, hair):
    x, y = np.abs(c.x), c.y
    skin, ink = c.two()
    mane, lip = c.colour(), c.colour((0.5, 0.9))
    c.paint(np.maximum(ellipse(x, y - 0.1, 0.75, 0.8), -y - 0.9 + 1.2 * hair), mane)
    c.outlined(
        np.minimum(ellipse(x, y, 0.6, 0.8), box(x, y + 0.4, 0.15 + 0.4 * jaw, 0.3, 0.1)), skin, ink
    )
    c.paint(np.maximum(ellipse(x, y - 0.25, 0.62, 0.6), 0.75 - 0.5 * hair - y), mane)
    at = 0.15 + 0.2 * apart
    c.paint(ellipse(x - at, y - 0.1, 0.07 + 0.09 * eyes, 0.05 + 0.09 * eyes), 0.97)
    c.paint(np.hypot(x - at, y - 0.1) - 0.06, 0.05)
    frown = 0.2 * (slant - 0.5)
    c.paint(
        capsule(x, y, (at - 0.13, 0.32 + frown), (at + 0.15, 0.32 - frown), 0.04, 0.03), mane * 0.5
    )
    c.paint(polygon(x, y, (0.0, 0.1), (0.04 + 0.16 * nose, -0.2), (0.0, -0.2)), ink)
    curve = y + 0.5 - 2.5 * (smile - 0.5) * (x * x - 0.05)
    c.paint(box(x, curve, 0.12 + 0.25 * mouth, 0.04 + 0.04 * nose), lip)


@family(bare=True, turn=0.06, zoom=(0.9, 1.3), shift=0.25)
def landscapes(c, horizon, ridges, rough, shift, sun, sky, ground, lake):
    x, y = c.x, c.y
    air, soil = (hsv(h + c.any(-0.03, 0.03), c.any(0.3, 0.7), c.any(0.4, 1)) for h in (sky, ground))
    c.scene(air, air * 0.8, clutter=1)
    c.paint(
        np.hypot(x - 1.4 * sun + 0.7, y - 0.55) - 0.14 - 0.1 * lake, hsv(c.any(0.05, 0.17), 0.5, 1)
    )
    for number in range(3):
        phase, often = 6.3 * shift * (number + 1), 2 + 5 * ridges + 2 * number
        hill = np.sin(often * x + phase) + rough * np.abs(np.sin(2.3 * often * x + 2 * phase)) * 1.5
        c.paint(
            y - 0.6 * horizon + 0.25 + 0.35 * number - 0.18 * hill, soil * (0.55 + 0.2 * number)
        )
    c.paint(np.where(lake > 0.5, ellipse(x - sun + 0.5, y + 0.75, 0.5, 0.15), 9.0), air)


@family(traits=8, turn=0.4, squeeze=0.25)
def blobs(c, *waves):
    """Flat shapes with a wavy edge.

    The class is the outline, four waves of it with their phases.
    """
    angle, radius = np.arctan2(c.y, c.x), 0.62
    for number, (size, phase) in enumerate(zip(waves[::2], waves[1::2]), 1):
        radius = radius + 0.3 / number**0.5 * (size - 0.3) * np.sin(number * angle + 6.3 * phase)
    dye, ink = c.two()
    c.outlined((np.hypot(c.x, c.y) - radius) * 0.7, dye, ink)
    c.paint((np.hypot(c.x, c.y) - 0.6 * radius) * 0.7, ink, (c.any() < 0.5)[..., None])


@family(traits=12, turn=0.4, squeeze=0.25)
def shards(c, *corners):
    """Three triangles fused: the class is where their corners are."""
    at = [1.8 * trait - 0.9 for trait in corners]
    dye, ink = c.two()
    shape = np.float32(9)
    for first in range(0, 12, 4):  # neighbours share a corner
        a, b, z = ((at[(first + i) % 12], at[(first + i + 1) % 12]) for i in (0, 2, 4))
        shape = np.minimum(shape, polygon(c.x, c.y, a, b, z))
    c.outlined(shape - 0.06, dye, ink)


def leaves(rng, n, side=120, count=160):
    """N textures, (n, side, side, 3) floats.

    Opaque discs and bars of all sizes fallen over one another: the dead-leaves model, whose
    statistics resemble photographs (Lee, Mumford and Huang, IJCV 2001).
    """
    axis = np.linspace(-1, 1, side, dtype=np.float32)

    def any_(low, high):
        return rng.uniform(low, high, (n, 1, 1)).astype(np.float32)

    image = np.zeros((n, side, side, 3), np.float32)
    base, spread, slim, grain = any_(0, 1), any_(0.03, 0.4), any_(0.1, 1), any_(0.05, 0.15)
    for _ in range(count):
        x, y = turned(
            axis[None, None, :],
            axis[None, :, None],
            any_(-3, 3),
            (any_(-1.1, 1.1), any_(-1.1, 1.1)),
        )
        size = grain / any_(0.1, 1)
        distance = np.where(
            any_(0, 1) < slim,
            ellipse(x, y, size, size * any_(0.3, 1)),
            box(x, y, size, size * slim),
        )
        colour = hsv(base + spread * any_(-1, 1), any_(0.1, 0.7), any_(0.1, 1))
        image += np.clip(0.5 - distance * side / 2, 0, 1)[..., None] * (colour - image)
    return image


def pretraining_images(
    classes: int = 60, per_class: int = 36, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Pictures of `classes` classes of each family.

    Another seed gives other pictures of the same classes.

    Returns:
        pixels (n, 48, 48, 3) uint8, labels (n,) int, and the name "family number" of each label.
    """
    pixels, names = [], []
    for name, (picture, traits) in [*FAMILIES.items(), ("leaves", (None, 0))]:
        own, rng = (np.random.default_rng([zlib.crc32(name.encode()), i]) for i in (0, 1 + seed))
        points = own.uniform(0, 1, (classes, traits)).astype(np.float32)
        rows = np.repeat(np.arange(classes), per_class)
        textures = leaves(own, classes) if name == "leaves" else None
        for block in np.array_split(rows, len(rows) // 64 + 1):  # small enough for the cache
            if name == "leaves":
                views = warp(
                    rng, textures[block], turn=0.5, zoom=(0.4, 0.75), shift=0.25, squeeze=0.2
                )
                pixels.append(lit(rng, views))
            else:
                pixels.append(picture(rng, *points[block].T[:, :, None, None]))
        names += [f"{name} {i:03d}" for i in range(classes)]
    return np.concatenate(pixels), np.repeat(np.arange(len(names)), per_class), names
