"""Small pictures painted with signed distances, a whole batch at a time.

A shape is a function of the plane: the distance to its edge, negative inside.  Two shapes join by
`minimum`, meet by `maximum`, and an edge is antialiased by letting the paint fade over one pixel.
A family below is one function `family(rng, trait, ...) -> (n, 32, 32, 3) uint8`: its traits, (n, 1, 1)
arrays in [0, 1), say which class is drawn; whatever the function draws from `rng` differs between two
pictures of one class.  In birds that is everything but colour, in vehicles it is colour: what tells classes
apart conflicts between datasets, the challenge of Sec. 3.3.
The distances follow Inigo Quilez, "2D distance functions" (iquilezles.org/articles/distfunctions2d).
"""

import numpy as np

SIZE = 32  # side of a picture, pixels
FINE = 2 * SIZE  # side of the canvas it is painted on
AXIS = ((np.arange(FINE, dtype=np.float32) + 0.5) / FINE * 2 - 1).astype(np.float32)


# ---------------------------------------------------------------- shapes: distance to the edge, negative inside


def ellipse(x, y, a, b):
    """Ellipse with half axes `a`, `b` (first-order distance)."""
    k, slope = np.hypot(x / a, y / b), np.hypot(x / a**2, y / b**2)
    return k * (k - 1) / np.maximum(slope, 1e-6)


def box(x, y, a, b, corner=0.0):
    """Rectangle with half sides `a`, `b` and corners of that radius."""
    dx, dy = np.abs(x) - a + corner, np.abs(y) - b + corner
    return np.hypot(np.maximum(dx, 0), np.maximum(dy, 0)) + np.minimum(np.maximum(dx, dy), 0) - corner


def capsule(x, y, start, end, r0, r1):
    """A stroke from `start` to `end` whose radius runs from `r0` to `r1`."""
    (x0, y0), (x1, y1) = start, end
    dx, dy = x1 - x0, y1 - y0
    t = np.clip(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy), 0, 1)
    return np.hypot(x - x0 - t * dx, y - y0 - t * dy) - (r0 + (r1 - r0) * t)


def polygon(x, y, *points):
    """Any simple polygon; `points` are (x, y) pairs of numbers or (n, 1, 1) arrays."""
    squared, outside = np.float32(np.inf), np.float32(1)
    for (x0, y0), (x1, y1) in zip(points, points[-1:] + points[:-1], strict=True):
        ex, ey, wx, wy = x1 - x0, y1 - y0, x - x0, y - y0
        t = np.clip((wx * ex + wy * ey) / (ex * ex + ey * ey), 0, 1)
        squared = np.minimum(squared, (wx - ex * t) ** 2 + (wy - ey * t) ** 2)
        above, below, left = y >= y0, y < y1, ex * wy > ey * wx
        outside = np.where((above & below & left) | ~(above | below | left), -outside, outside)
    return outside * np.sqrt(squared)


def rosette(x, y, count, inner, outer, sharpness):
    """A star of `count` rounded arms between the radii `inner` and `outer`; sharpness > 1 makes them pointed."""
    wave = np.abs(np.cos(np.arctan2(y, x) * count / 2)) ** sharpness
    return np.hypot(x, y) - (inner + (outer - inner) * wave)


def turned(x, y, angle, centre=(0.0, 0.0)):
    """The coordinates of a frame at `centre`, turned by `angle` (radians)."""
    x, y, c, s = x - centre[0], y - centre[1], np.cos(angle), np.sin(angle)
    return c * x + s * y, c * y - s * x


def pattern(x, y, kind, angle, period, width):
    """An endless motif: kind 0 stripes, 1 checks, 2 dots, 3 zigzag; `width` is the painted share of a period."""
    x, y = turned(x, y, angle)

    def saw(z):  # 0 in the middle of a period
        return np.abs(z / period - np.floor(z / period) - 0.5) * period

    half = width * period / 2
    stripes, dots = saw(x) - half, np.hypot(saw(x), saw(y)) - 1.2 * half
    return np.choose(kind, [stripes, np.minimum(stripes, saw(y) - half), dots, saw(x + 1.2 * saw(y)) - half])


# ---------------------------------------------------------------- paint, light, lens


def hsv(hue, saturation, value):
    """RGB in [0, 1] on a new last axis; the hue goes round once per unit."""
    hue, saturation, value = np.broadcast_arrays(hue, saturation, value)
    ramp = np.abs((hue[..., None] * 6 + np.float32([0, 4, 2])) % 6 - 3) - 1
    return (value[..., None] * (1 - saturation[..., None] * (1 - np.clip(ramp, 0, 1)))).astype(np.float32)


class Canvas:
    """n pictures painted at once, back to front, in the coordinates of an object in a random pose.

    Args:
        turn: largest rotation of the object, radians.
        zoom: smallest and largest size; at 1 the object's unit square fills the picture.
        shift: largest displacement, in half pictures.
        mirror: whether half of the pictures look the other way.
    """

    def __init__(self, rng, n, turn=0.15, zoom=(0.75, 1.0), shift=0.12, mirror=True):
        self.rng, self.n = rng, n
        scale, flip = self.any(*zoom), 1 - 2 * (self.any() < 0.5 * mirror)
        u, v = AXIS[None, None, :] - self.any(-shift, shift), -AXIS[None, :, None] - self.any(-shift, shift)
        self.x, self.y = turned(flip * u / scale, v / scale, self.any(-turn, turn))
        self.pixel = 2 / FINE / scale
        self.image = np.zeros((n, FINE, FINE, 3), np.float32)

    def any(self, low=0.0, high=1.0):
        """A number per picture, (n, 1, 1)."""
        return self.rng.uniform(low, high, (self.n, 1, 1)).astype(np.float32)

    def colour(self, saturation=(0.2, 0.9), value=(0.3, 0.95)):
        """A colour per picture, (n, 1, 1, 3)."""
        return hsv(self.any(), self.any(*saturation), self.any(*value))

    def paint(self, distance, colour, strength=1.0):
        """Cover the inside of a shape; the edge fades over one pixel."""
        alpha = strength * np.clip(0.5 - distance / self.pixel, 0, 1)[..., None]
        self.image += alpha * (colour - self.image)

    def backdrop(self, *colours):
        """Fill the picture from its first colour (below) to its last (above) and blur two spots into it."""
        below, above = colours[0], colours[-1]
        u, v = AXIS[None, None, :], -AXIS[None, :, None]
        height = np.clip(0.5 + 0.5 * v + 0.3 * self.any(-1) * u, 0, 1)[..., None]
        self.image[:] = below + (above - below) * height
        for _ in range(2):
            spot = np.exp(-((u - self.any(-1)) ** 2 + (v - self.any(-1)) ** 2) / self.any(0.1, 0.5))[..., None]
            self.image += 0.3 * spot * (self.colour() - self.image)

    def develop(self, light=0.2, noise=0.02):
        """Light the scene, average the fine pixels, add the sensor's noise: (n, 32, 32, 3) uint8."""
        small = self.image.reshape(self.n, SIZE, 2, SIZE, 2, 3).mean((2, 4))
        return lit(self.rng, small, light, noise)


def lit(rng, images, light=0.2, noise=0.02):
    """Images in [0, 1] under another lamp (brightness, tint, slope) and with noise, as uint8."""
    n, size = len(images), images.shape[1]
    axis = np.linspace(-1, 1, size, dtype=np.float32)
    lamp, tilt = rng.uniform(1 - light, 1 + light, n), rng.uniform(-light, light, (2, n))
    tint = rng.uniform(1 - light / 3, 1 + light / 3, (n, 1, 1, 3))
    slope = 1 + tilt[0][:, None, None] * axis[None, None, :] + tilt[1][:, None, None] * axis[None, :, None]
    images = images * (lamp[:, None, None] * slope)[..., None] * tint + rng.normal(0, noise, images.shape)
    return np.round(255 * np.clip(images, 0, 1)).astype(np.uint8)


def warp(rng, sources, turn, zoom, shift):
    """Look at each square source, (n, H, H, c) floats, from another viewpoint: (n, 32, 32, c).

    `turn` in radians, `zoom` = (smallest, largest) share of the source that is seen, `shift` in half sources;
    what lies beyond a source repeats its edge.
    """
    n, side = sources.shape[:2]
    u, v = turned(AXIS[None, None, :], AXIS[None, :, None], rng.uniform(-turn, turn, (n, 1, 1)))
    seen, right, down = (rng.uniform(low, high, (n, 1, 1)) for low, high in (zoom, (-shift, shift), (-shift, shift)))
    u, v = (np.clip((w + 1) / 2 * side - 0.5, 0, side - 1.001) for w in (u * seen + right, v * seen + down))
    i, j = v.astype(int), u.astype(int)
    a, b, row = (v - i)[..., None], (u - j)[..., None], np.arange(n)[:, None, None]
    top = sources[row, i, j] * (1 - b) + sources[row, i, j + 1] * b
    bottom = sources[row, i + 1, j] * (1 - b) + sources[row, i + 1, j + 1] * b
    return (top * (1 - a) + bottom * a).reshape(n, SIZE, 2, SIZE, 2, -1).mean((2, 4)).astype(np.float32)


# ---------------------------------------------------------------- the families


def birds(rng, back, belly, crown):
    """Plumage is the class; build, posture, beak and surroundings are chance."""
    c = Canvas(rng, len(back), turn=0.35)
    x, y = c.x, c.y

    def feather(hue):
        return hsv(hue + c.any(-0.04, 0.04), c.any(0.55, 0.9), c.any(0.55, 0.95))

    c.backdrop(c.colour((0.1, 0.6)), c.colour((0.1, 0.5), (0.5, 1)))
    c.paint(capsule(x, y, (-1.2, -0.62), (1.2, -0.62 + c.any(-0.2, 0.2)), 0.06, 0.06), hsv(0.08, 0.5, c.any(0.2, 0.4)))
    plump, neck, beak = c.any(0.28, 0.42), c.any(0.3, 0.5), c.any(0.1, 0.3)
    coat, under, cap = feather(back), feather(belly), feather(crown)
    bx, by = turned(x, y, c.any(0.1, 0.6))
    c.paint(capsule(bx, by, (-0.45, 0.0), (-0.6 - c.any(0, 0.35), 0.0), 0.1, c.any(0.04, 0.14)), coat * 0.75)
    body = ellipse(bx, by, 0.55, plump)
    c.paint(body, coat)
    c.paint(np.maximum(body, by - 0.05 + 0.25 * bx), under)
    hx, hy = x - neck, y - c.any(0.38, 0.5)
    c.paint(polygon(hx, hy, (0.1, 0.1), (0.22 + beak, -0.03), (0.1, -0.1)), hsv(c.any(0.05, 0.14), 0.8, c.any(0.3, 1)))
    head = np.hypot(hx, hy) - 0.24
    c.paint(head, under)
    c.paint(np.maximum(head, -hy - 0.02), cap)
    c.paint(ellipse(*turned(bx, by, c.any(-0.4, 0.1), (-0.12, 0.1)), 0.34, 0.16), coat * c.any(0.6, 0.85)[..., None])
    c.paint(np.hypot(hx - 0.08, hy - 0.03) - 0.055, 0.05)
    return c.develop()


def flowers(rng, petals, form, hue, heart):
    """The number and form of the petals and their colour are the class; the meadow and the view are chance."""
    c = Canvas(rng, len(petals), turn=np.pi, zoom=(0.6, 1.0), shift=0.2)
    c.backdrop(hsv(c.any(0.2, 0.4), c.any(0.3, 0.8), c.any(0.15, 0.4)), hsv(c.any(0.2, 0.6), 0.4, c.any(0.3, 0.7)))
    for _ in range(2):
        lx, ly = turned(c.x, c.y, c.any(-3, 3))
        c.paint(ellipse(lx - 0.7, ly, 0.5, c.any(0.1, 0.2)), hsv(c.any(0.25, 0.4), 0.6, c.any(0.2, 0.5)))
    x, y = c.x / c.any(0.75, 1.0), c.y  # seen from the side a flower is narrow
    count = 3 + np.floor(petals * 6)
    sharpness, tone = 0.35 * 8**form, hsv(hue + c.any(-0.05, 0.05), c.any(0.4, 0.85), c.any(0.6, 1))
    c.paint(rosette(x, y, count, c.any(0.2, 0.35), c.any(0.8, 0.95), sharpness), tone)
    c.paint(rosette(x, y, count, 0.12, 0.65, 2 * sharpness), tone * 0.7, 0.6)
    c.paint(np.hypot(x, y) - (0.12 + 0.16 * heart + c.any(-0.02, 0.02)), hsv(c.any(0.1, 0.17), 0.8, c.any(0.4, 1)))
    return c.develop()


def garments(rng, cut, motif, angle, period, width):
    """Cut and pattern are the class; the dye of cloth and print is chance."""
    c = Canvas(rng, len(cut), turn=0.06, zoom=(0.85, 0.95), shift=0.05, mirror=False)
    c.backdrop(c.colour((0, 0.3), (0.6, 1)), c.colour((0, 0.3), (0.6, 1)))
    x, y, m = np.abs(c.x), c.y, -0.5  # cloth is symmetric: draw its right half, well past the middle
    low, wide = c.any(-0.9, -0.75), c.any(-0.05, 0.05)
    shirt = polygon(x, y, (m, 0.8), (0.25, 0.8), (0.9, 0.4 + wide), (0.75, 0.05), (0.5, 0.25), (0.5, low), (m, low))
    shirt = np.maximum(shirt, -ellipse(x, y - 0.85, 0.2, 0.15))
    dress = polygon(x, y, (m, 0.85), (0.32, 0.85), (0.36, 0.35), (0.24, 0.1), (0.7 + wide, low), (m, low))
    trousers = polygon(x, y, (m, 0.85), (0.42, 0.85), (0.58 + wide, low), (0.2, low), (0.06, 0.25), (m, 0.25))
    skirt = polygon(x, y, (m, 0.6), (0.36, 0.6), (0.8 + wide, low + 0.15), (m, low + 0.15))
    cloth = np.choose((cut * 4).astype(int), [shirt, dress, trousers, skirt])
    kind = (motif * 4).astype(int)
    half_turn = np.where((kind == 0) | (kind == 3), np.pi, np.pi / 2)  # checks and dots repeat after a quarter
    print_ = pattern(c.x + c.any(-1, 1), c.y, kind, angle * half_turn, 0.2 + 0.6 * period, 0.2 + 0.6 * width)
    dye, ink = c.colour((0.1, 0.9), (0.25, 0.9)), c.colour((0.1, 0.9), (0.2, 1))
    ink = np.where(np.abs(ink.mean(-1) - dye.mean(-1))[..., None] < 0.2, (dye + 0.5) % 1, ink)
    c.paint(cloth - 0.03, dye * 0.6)
    c.paint(cloth, dye)
    c.paint(np.maximum(cloth, print_), ink)
    return c.develop()


def vehicles(rng, length, cabin, place, roof, wheel):
    """Proportions are the class; paint, road and weather are chance."""
    c = Canvas(rng, len(length), turn=0.05, zoom=(0.88, 1.0), shift=0.05)
    c.backdrop(c.colour((0, 0.3), (0.2, 0.6)), c.colour((0.05, 0.6), (0.5, 1)))
    x, y = c.x, c.y + 0.1
    c.paint(y + 0.42, c.colour((0, 0.15), (0.25, 0.6)))
    half, room, high, round_ = 0.6 + 0.35 * length, 0.2 + 0.32 * cabin, 0.2 + 0.45 * roof, 0.11 + 0.12 * wheel
    middle = (half - room) * (1.6 * place - 0.8)
    paint, sill = c.colour((0, 0.95), (0.2, 1)), c.any(0.0, 0.06)
    body = box(x, y + 0.2, half, 0.2 + sill, 0.1)
    slope = 0.04 + c.any(0.08, 0.14)

    def shell(d):  # the cabin, `d` thinner all around
        left, right, low, top = middle - room + d, middle + room - d / 2, -0.1 + d, high - d
        return polygon(
            x, y, (left, low), (middle - room + slope / 2 + d, top), (middle + room - slope - d, top), (right, low)
        )

    c.paint(np.minimum(body, shell(0.0)) - 0.035, 0.05, 0.8)
    c.paint(np.minimum(body, shell(0.0)), paint)
    c.paint(np.maximum(shell(0.06), 0.02 - y), hsv(c.any(0.5, 0.65), 0.35, c.any(0.15, 0.8)))
    c.paint(np.maximum(np.abs(x - middle) - 0.03, shell(0.03)), paint)
    c.paint(np.maximum(body, y + 0.27), paint * 0.7)
    c.paint(np.hypot(x - half + 0.06, y + 0.12) - 0.06, np.float32([1, 0.95, 0.6]))
    for side in (-1, 1):
        hub = np.hypot(x - side * (half - 0.28), y + 0.42)
        c.paint(hub - round_, 0.08)
        c.paint(hub - 0.5 * round_, c.any(0.4, 0.9)[..., None])
    return c.develop()


def aircraft(rng, sweep, span, chord, tail, engines):
    """The silhouette from below is the class; livery, heading and sky are chance."""
    c = Canvas(rng, len(sweep), turn=0.3, zoom=(0.85, 1.0), shift=0.06)
    c.backdrop(c.colour((0.1, 0.6), (0.5, 1)), c.colour((0.1, 0.6), (0.5, 1)))
    x, y = np.abs(c.x), c.y
    reach, back, root = 0.5 + 0.45 * span, 0.75 * sweep - 0.15, 0.22 + 0.35 * chord
    tip = root * (0.3 + c.any(0, 0.1))
    lead, trail = 0.25 - back, 0.25 - root
    wing = polygon(x, y, (-0.5, 0.25), (0.0, 0.25), (reach, lead), (reach, lead - tip), (0.0, trail), (-0.5, trail))
    fin = 0.18 + 0.3 * tail
    tail_ = polygon(x, y, (-0.5, -0.6), (0.0, -0.6), (fin, -0.72), (fin, -0.85), (0.0, -0.82), (-0.5, -0.82))
    hull = capsule(x, y, (0.0, 0.75), (0.0, -0.85), c.any(0.1, 0.13), 0.05)
    number = np.floor(engines * 3)  # none, one or two under each wing

    def pod(share):
        return box(x - share * reach, y - 0.27 + share * back, 0.06, 0.15, 0.05)

    pods = np.where(number == 0, 9.0, np.minimum(pod(0.36), np.where(number == 2, pod(0.68), 9.0)))
    livery, trim = c.colour((0, 0.9), (0.1, 1)), c.colour((0, 0.9), (0.1, 1))
    plane = np.minimum(np.minimum(wing, tail_), np.minimum(hull, pods))
    c.paint(plane - 0.035, 0.1, 0.8)
    c.paint(plane, livery)
    c.paint(np.maximum(np.minimum(hull, tail_), y - c.any(-0.6, 0.6)), trim)
    return c.develop()


def emblems(rng, corners, depth, aspect, hue, print_hue, motif, period):
    """Shape, colour and pattern at once, of nothing in particular: the backbone learns to see with these."""
    c = Canvas(rng, len(corners), turn=0.5, zoom=(0.6, 0.95), shift=0.2, mirror=False)
    c.backdrop(c.colour(), c.colour())
    x, y = c.x * (0.8 + 0.8 * aspect), c.y
    shape = rosette(x, y, 2 + np.floor(corners * 6), 0.75 - 0.55 * depth, 0.9, 0.5 + 2 * depth)
    dye = hsv(hue + c.any(-0.03, 0.03), c.any(0.6, 0.9), c.any(0.6, 0.95))
    ink = hsv(print_hue + c.any(-0.03, 0.03), c.any(0.5, 0.8), c.any(0.25, 1))
    c.paint(shape, dye)
    kind = (motif * 5).astype(int)  # the fifth is plain
    print_ = pattern(x, y, np.minimum(kind, 3), 2.4 * hue, 0.25 + 0.4 * period, 0.45)
    c.paint(np.where(kind == 4, 9.0, np.maximum(shape, print_)), ink)
    return c.develop()


def leaves(rng, n, side, count=160):
    """n textures, (n, side, side, 3) floats: opaque discs and bars of all sizes fallen over one another.

    The dead-leaves model, whose statistics resemble photographs (Lee, Mumford and Huang, IJCV 2001).
    """
    axis = np.linspace(-1, 1, side, dtype=np.float32)

    def any_(low, high):
        return rng.uniform(low, high, (n, 1, 1)).astype(np.float32)

    image = np.zeros((n, side, side, 3), np.float32)
    base = any_(0, 1)
    for _ in range(count):
        x, y = turned(axis[None, None, :], axis[None, :, None], any_(-3, 3), (any_(-1.1, 1.1), any_(-1.1, 1.1)))
        size = 0.06 / any_(0.08, 1)
        round_, flat, thin = any_(0, 1) < 0.5, any_(0.3, 1), any_(0.1, 1)
        distance = np.where(round_, ellipse(x, y, size, size * flat), box(x, y, size, size * thin))
        colour = hsv(base + any_(-0.15, 0.15), any_(0.1, 0.7), any_(0.1, 1))
        image += np.clip(0.5 - distance * side / 2, 0, 1)[..., None] * (colour - image)
    return image
