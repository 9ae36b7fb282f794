"""The drawn datasets of `mini`: birds, flowers, garments, vehicles, aircraft.

A family is a function of its traits, (n, 1, 1) arrays of levels, which determine the class; pose,
size, light, surroundings, covering objects and all else that the function draws at random differ
between pictures of one class.  Families disagree on which properties matter, the challenge of
Sec. 3.3: plumage alone distinguishes birds, but paint says nothing about a vehicle; a flower may be
seen from any side, but a garment hangs upright, because the direction of its pattern matters.
"""

import numpy as np
from draw import Canvas, box, capsule, ellipse, hsv, pattern, polygon, rosette, turned

HUES = ("red", "amber", "lime", "green", "cyan", "blue", "violet", "pink")
# family -> trait of its function -> what its levels are called
TRAITS = {
    "birds": {"back": HUES, "belly": HUES, "crown": HUES},
    "flowers": {
        "eye": ("pale", "dark"),
        "petals": ("three", "four", "five", "six", "seven", "eight"),
        "form": ("round", "oval", "sharp"),
        "hue": HUES,
    },
    "garments": {
        "cut": ("shirt", "tee", "dress", "pants", "short", "skirt"),
        "motif": ("bar", "net", "dot", "zag"),
        "angle": ("flat", "tilt"),
        "width": ("thin", "bold"),
        "period": ("fine", "mid", "wide"),
    },
    "vehicles": {
        "length": ("short", "mid", "long"),
        "cabin": ("pod", "cab", "van"),
        "place": ("back", "core", "fore"),
        "roof": ("low", "high", "tall"),
        "wheel": ("wee", "big"),
    },
    "aircraft": {
        "sweep": ("flat", "bent", "dart"),
        "span": ("short", "mid", "wide"),
        "chord": ("thin", "fat"),
        "tail": ("wee", "big"),
        "engines": ("none", "two", "four"),
    },
}


def birds(rng, back, belly, crown):
    """Plumage is the class; build, posture, beak and surroundings are chance."""
    c = Canvas(rng, len(back), turn=0.3, zoom=(0.75, 1.0), shift=0.12, squeeze=0.1)
    x, y = c.x, c.y

    def feather(hue):
        return hsv(hue / 8 + c.any(-0.025, 0.025), c.any(0.6, 0.95), c.any(0.6, 1))

    c.scene(clutter=2, strength=0.5)
    c.paint(
        capsule(x, y, (-1.2, -0.62), (1.2, -0.62 + c.any(-0.2, 0.2)), 0.06, 0.06),
        hsv(0.08, 0.5, c.any(0.2, 0.4)),
    )
    plump, neck, beak = c.any(0.25, 0.45), c.any(0.25, 0.55), c.any(0.05, 0.4)
    coat, under, cap = feather(back), feather(belly), feather(crown)
    bx, by = turned(x, y, c.any(0.0, 0.8))
    c.paint(
        capsule(bx, by, (-0.45, 0.0), (-0.6 - c.any(0, 0.4), 0.0), 0.1, c.any(0.04, 0.16)),
        coat * 0.75,
    )
    body = ellipse(bx, by, 0.55, plump)
    c.paint(body, coat)
    c.paint(np.maximum(body, by - 0.05 + 0.25 * bx), under)
    hx, hy = x - neck, y - c.any(0.35, 0.55)
    c.paint(polygon(hx, hy, (0.1, 0.1), (0.22 + beak, -0.03), (0.1, -0.1)), c.colour())
    head = np.hypot(hx, hy) - c.any(0.2, 0.27)
    c.paint(head, under)
    c.paint(np.maximum(head, -hy - 0.02), cap)
    c.paint(
        ellipse(*turned(bx, by, c.any(-0.4, 0.1), (-0.12, 0.1)), 0.34, 0.16),
        coat * c.any(0.6, 0.85)[..., None],
    )
    c.paint(np.hypot(hx - 0.08, hy - 0.03) - 0.055, 0.05)
    c.veil(0.15)
    return c.develop()


def flowers(rng, eye, petals, form, hue):
    """Number, form and colour of the petals and the tone of the eye are the class.

    Meadow and view are chance.
    """
    c = Canvas(rng, len(petals), turn=np.pi, zoom=(0.7, 1.0), shift=0.15, squeeze=0.2)
    c.scene(clutter=1, strength=0.5)
    for _ in range(2):
        lx, ly = turned(c.x, c.y, c.any(-3, 3))
        c.paint(
            ellipse(lx - 0.7, ly, 0.5, c.any(0.1, 0.2)), hsv(c.any(0.2, 0.45), 0.6, c.any(0.2, 0.7))
        )
    count, sharpness = 3 + petals, 0.35 * 8 ** (0.15 + 0.35 * form)
    tone = hsv(hue / 8 + c.any(-0.035, 0.035), c.any(0.45, 0.9), c.any(0.5, 1))
    c.paint(rosette(c.x, c.y, count, c.any(0.2, 0.35), c.any(0.8, 0.95), sharpness), tone)
    c.paint(
        rosette(c.x, c.y, count, 0.12, 0.65, 2 * sharpness), tone * 0.7, c.any(0, 0.7)[..., None]
    )
    c.paint(
        np.hypot(c.x, c.y) - c.any(0.14, 0.26),
        np.where(eye == 0, c.any(0.8, 1), c.any(0.05, 0.25))[..., None],
    )
    c.veil(0.15)
    return c.develop()


def garments(rng, cut, motif, angle, width, period):
    """Cut and pattern are the class.

    The dye of cloth and print, the room and the folds are chance.
    """
    c = Canvas(rng, len(cut), turn=0.08, zoom=(0.8, 1.0), shift=0.08, squeeze=0.08, mirror=False)
    c.scene(clutter=2, strength=0.5)
    x, y, m = (
        np.abs(c.x),
        c.y,
        -0.5,
    )  # cloth is symmetric: draw its right half, well past the middle
    low, wide = c.any(-0.95, -0.7), c.any(-0.07, 0.07)

    def top(sleeve):
        arm = polygon(
            x,
            y,
            (m, 0.8),
            (0.25, 0.8),
            (0.55 + sleeve, 0.6 - 1.2 * sleeve),
            (0.5, 0.25),
            (0.5, low),
            (m, low),
        )
        return np.maximum(arm, -ellipse(x, y - 0.85, 0.2, 0.15))

    def legs(end):
        return polygon(
            x, y, (m, 0.85), (0.42, 0.85), (0.55 + wide, end), (0.2, end), (0.06, 0.25), (m, 0.25)
        )

    dress = polygon(
        x, y, (m, 0.85), (0.32, 0.85), (0.36, 0.35), (0.24, 0.1), (0.7 + wide, low), (m, low)
    )
    skirt = polygon(x, y, (m, 0.6), (0.36, 0.6), (0.8 + wide, low + 0.15), (m, low + 0.15))
    shirt, tee = top(0.38 + wide), np.minimum(top(0.0), box(x - 0.5, y - 0.6, 0.22, 0.17 + wide))
    cloth = np.choose(cut.astype(int), [shirt, tee, dress, legs(low), legs(low + 0.75), skirt])
    tilt = angle * np.sign(c.any(-1, 1)) * np.pi / 4 + c.any(
        -0.1, 0.1
    )  # either way: training flips pictures
    share = 0.3 + 0.3 * width + c.any(-0.05, 0.05)
    moved = c.x + c.any(-1, 1), c.y + c.any(-1, 1)
    print_ = pattern(
        *moved, motif.astype(int), tilt + np.pi / 2 * (motif == 0), 0.22 * 1.55**period, share
    )
    dye, ink = c.two()
    c.outlined(cloth, dye, dye * 0.5)
    c.paint(np.maximum(cloth, print_), ink)
    c.veil(0.15)
    return c.develop()


def vehicles(rng, length, cabin, place, roof, wheel):
    """Proportions are the class; paint, road and weather are chance."""
    c = Canvas(rng, len(length), turn=0.05, zoom=(0.9, 1.0), shift=0.05, squeeze=0.03)
    c.scene(clutter=1, strength=0.5)
    x, y = c.x, c.y + 0.1
    c.paint(y + 0.42, c.colour((0, 0.3)), 0.8)
    half, room = 0.55 + 0.2 * length + c.any(-0.02, 0.02), 0.2 + 0.17 * cabin + c.any(-0.01, 0.01)
    high, round_ = 0.16 + 0.25 * roof + c.any(-0.02, 0.02), 0.11 + 0.12 * wheel + c.any(-0.01, 0.01)
    middle = (half - room) * 0.75 * (place - 1)
    (paint, trim), sill, slope = c.two(0.15), 0.03, c.any(0.1, 0.16)
    body = box(x, y + 0.2, half, 0.2 + sill, 0.1)

    def shell(d):  # the cabin, `d` thinner all around
        left, right, top = middle - room, middle + room, high - d
        corners = (
            (left + d, d - 0.1),
            (left + slope / 2 + d, top),
            (right - slope - d, top),
            (right - d / 2, d - 0.1),
        )
        return polygon(x, y, *corners)

    c.outlined(np.minimum(body, shell(0.0)), paint, trim * 0.5)
    c.paint(np.maximum(shell(0.06), 0.02 - y), hsv(c.any(0.4, 0.75), 0.35, c.any(0.1, 0.9)))
    c.paint(np.maximum(np.abs(x - middle) - 0.03, shell(0.03)), paint)
    c.paint(np.maximum(body, y + 0.27), trim)
    c.paint(np.hypot(x - half + 0.06, y + 0.12) - 0.06, np.float32([1, 0.95, 0.6]))
    for side in (-1, 1):
        hub = np.hypot(x - side * (half - 0.28), y + 0.42)
        c.paint(hub - round_, 0.08)
        c.paint(hub - 0.5 * round_, c.any(0.2, 0.95)[..., None])
    c.veil(0.15)
    return c.develop()


def aircraft(rng, sweep, span, chord, tail, engines):
    """The silhouette from below is the class; livery, heading and sky are chance."""
    c = Canvas(rng, len(sweep), turn=0.3, zoom=(0.88, 1.0), shift=0.05, squeeze=0.03)
    c.scene(clutter=1, strength=0.5)
    x, y = np.abs(c.x), c.y
    reach, back, root = (
        0.45 + 0.24 * span + c.any(-0.02, 0.02),
        0.32 * sweep + c.any(-0.02, 0.02),
        0.24 + 0.26 * chord,
    )
    tip = root * c.any(0.35, 0.45)
    lead, trail = 0.25 - back, 0.25 - root
    wing = polygon(
        x,
        y,
        (-0.5, 0.25),
        (0.0, 0.25),
        (reach, lead),
        (reach, lead - tip),
        (0.0, trail),
        (-0.5, trail),
    )
    fin = 0.2 + 0.25 * tail
    tail_ = polygon(
        x, y, (-0.5, -0.6), (0.0, -0.6), (fin, -0.72), (fin, -0.85), (0.0, -0.82), (-0.5, -0.82)
    )
    hull = capsule(x, y, (0.0, 0.75), (0.0, -0.85), c.any(0.11, 0.13), 0.05)

    def pod(share):
        return box(x - share * reach, y - 0.27 + share * back, 0.06, 0.15, 0.05)

    pods = np.where(
        engines == 0, 9.0, np.minimum(pod(0.36), np.where(engines == 2, pod(0.68), 9.0))
    )
    livery, trim = c.two()
    plane = np.minimum(np.minimum(wing, tail_), np.minimum(hull, pods))
    c.outlined(plane, livery, livery * 0.3)
    c.paint(np.maximum(np.minimum(hull, tail_), y + c.any(0.2, 0.4)), trim)
    c.veil(0.15)
    return c.develop()
