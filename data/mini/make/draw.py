"""Small pictures painted with signed distances: shapes, paint, light and lens.

A whole batch is painted at a time; all that differs between its pictures is an (n, 1, 1) array.
A shape is a function of the plane: the distance to its edge, negative inside.  Two shapes join by
`minimum`, meet by `maximum`, and an edge is antialiased by letting the paint fade over one pixel.
The distances follow Inigo Quilez, "2D distance functions"
(iquilezles.org/articles/distfunctions2d).
"""

import numpy as np

SIZE = 48  # side of a picture, pixels
FINE = 2 * SIZE  # side of the canvas it is painted on
AXIS = ((np.arange(FINE, dtype=np.float32) + 0.5) / FINE * 2 - 1).astype(np.float32)


# ---------------------------------------------------------------- shapes
# The distance to the edge, negative inside.


def ellipse(x, y, a, b):
    """Ellipse with half axes `a`, `b` (first-order distance)."""
    k, slope = np.hypot(x / a, y / b), np.hypot(x / a**2, y / b**2)
    return k * (k - 1) / np.maximum(slope, 1e-6)


def box(x, y, a, b, corner=0.0):
    """Rectangle with half sides `a`, `b` and corners of that radius."""
    dx, dy = np.abs(x) - a + corner, np.abs(y) - b + corner
    return (
        np.hypot(np.maximum(dx, 0), np.maximum(dy, 0)) + np.minimum(np.maximum(dx, dy), 0) - corner
    )


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
        t = np.clip((wx * ex + wy * ey) / np.maximum(ex * ex + ey * ey, 1e-9), 0, 1)
        squared = np.minimum(squared, (wx - ex * t) ** 2 + (wy - ey * t) ** 2)
        above, below, left = y >= y0, y < y1, ex * wy > ey * wx
        outside = np.where((above & below & left) | ~(above | below | left), -outside, outside)
    return outside * np.sqrt(squared)


def rosette(x, y, count, inner, outer, sharpness):
    """A star of `count` rounded arms between the radii `inner` and `outer`.

    A sharpness above 1 makes them pointed.
    """
    wave = np.abs(np.cos(np.arctan2(y, x) * count / 2)) ** sharpness
    return np.hypot(x, y) - (inner + (outer - inner) * wave)


def turned(x, y, angle, centre=(0.0, 0.0)):
    """The coordinates of a frame at `centre`, turned by `angle` (radians)."""
    x, y, c, s = x - centre[0], y - centre[1], np.cos(angle), np.sin(angle)
    return c * x + s * y, c * y - s * x


def pattern(x, y, kind, angle, period, width):
    """An endless motif: kind 0 stripes, 1 checks, 2 dots, 3 zigzag.

    `width` is the painted share of a period.
    """
    x, y = turned(x, y, angle)

    def saw(z):  # 0 in the middle of a period
        return np.abs(z / period - np.floor(z / period) - 0.5) * period

    half = width * period / 2
    stripes, dots = saw(x) - half, np.hypot(saw(x), saw(y)) - 1.2 * half
    return np.choose(
        kind, [stripes, np.minimum(stripes, saw(y) - half), dots, saw(x + 1.2 * saw(y)) - half]
    )


def hsv(hue, saturation, value):
    """RGB in [0, 1] on a new last axis; the hue goes round once per unit."""
    hue, saturation, value = np.broadcast_arrays(hue, saturation, value)
    ramp = np.abs((hue[..., None] * 6 + np.float32([0, 4, 2])) % 6 - 3) - 1
    return (value[..., None] * (1 - saturation[..., None] * (1 - np.clip(ramp, 0, 1)))).astype(
        np.float32
    )


# ---------------------------------------------------------------- paint, light, lens


class Canvas:
    """n pictures painted at once, back to front, in the coordinates of an object in a random pose.

    Args:
        turn: largest rotation of the object, radians.
        zoom: smallest and largest size; at 1 the object's unit square fills the picture.
        shift: largest displacement, in half pictures.
        squeeze: how much narrower the object may look, as seen from the side; and how much sheared.
        mirror: whether half of the pictures look the other way.
    """

    def __init__(self, rng, n, turn=0.15, zoom=(0.65, 1.0), shift=0.2, squeeze=0.15, mirror=True):
        self.rng, self.n = rng, n
        scale, flip = self.any(*zoom), 1 - 2 * (self.any() < 0.5 * mirror)
        self.u, self.v = np.broadcast_arrays(AXIS[None, None, :], -AXIS[None, :, None])
        centre = self.any(-shift, shift), self.any(-shift, shift)
        x, self.y = turned(
            self.u / scale, self.v / scale, self.any(-turn, turn), tuple(c / scale for c in centre)
        )
        self.x = flip * (x / self.any(1 - squeeze, 1) + self.any(-squeeze, squeeze) * self.y)
        self.pixel = 2 / FINE / scale
        self.image = np.zeros((n, FINE, FINE, 3), np.float32)

    def any(self, low=0.0, high=1.0):
        """A number per picture, (n, 1, 1)."""
        return self.rng.uniform(low, high, (self.n, 1, 1)).astype(np.float32)

    def colour(self, saturation=(0.1, 0.9), value=(0.2, 1.0), hue=(0, 1)):
        """A colour per picture, (n, 1, 1, 3)."""
        return hsv(self.any(*hue), self.any(*saturation), self.any(*value))

    def two(self, gap=0.25):
        """Two colours per picture of clearly unlike brightness."""
        one, other = self.colour(), self.colour()
        near = np.abs(other.mean(-1) - one.mean(-1))[..., None] < gap
        return one, np.where(
            near, np.where(one.mean(-1, keepdims=True) < 0.5, 1 - 0.3 * other, 0.3 * other), other
        )

    def paint(self, distance, colour, strength=1.0, pixel=None):
        """Cover the inside of a shape; the edge fades over one pixel."""
        alpha = (
            strength
            * np.clip(0.5 - distance / (self.pixel if pixel is None else pixel), 0, 1)[..., None]
        )
        self.image += alpha * (colour - self.image)

    def outlined(self, distance, colour, ink, width=0.035):
        """Cover a shape and draw its edge."""
        self.paint(distance - width, ink)
        self.paint(distance, colour)

    def scene(self, *colours, clutter=4, strength=0.8):
        """A place of any two colours (or those given).

        `clutter` shapes of any colour lie about.
        """
        below, above = colours if colours else (self.colour((0, 0.7)), self.colour((0, 0.7)))
        slope = np.clip(0.5 + self.any(-0.6, 0.6) * self.u + self.any(-0.6, 0.6) * self.v, 0, 1)[
            ..., None
        ]
        self.image[:] = below + (above - below) * slope
        for _ in range(clutter):
            self.scrap(1.0, self.any(0, strength))

    def scrap(self, reach, strength):
        """A disc or bar somewhere in the picture, any colour."""
        x, y = turned(
            self.u, self.v, self.any(-3, 3), (self.any(-reach, reach), self.any(-reach, reach))
        )
        long, wide = self.any(0.1, 0.7), self.any(0.04, 0.35)
        shape = np.where(self.any() < 0.5, ellipse(x, y, long, wide), box(x, y, 2 * long, wide / 2))
        self.paint(shape, self.colour(), strength[..., None], 2 / FINE)

    def veil(self, chance=0.5):
        """Something before the object in a share of the pictures.

        It is a disc or a bar that covers a part of the object.
        """
        angle, far = self.any(-3.2, 3.2), self.any(0.5, 1.0)
        x, y = turned(self.u, self.v, self.any(-3, 3), (far * np.cos(angle), far * np.sin(angle)))
        shape = np.where(
            self.any() < 0.5,
            ellipse(x, y, 0.4, self.any(0.2, 0.4)),
            box(x, y, 1.5, self.any(0.04, 0.12)),
        )
        self.paint(shape, self.colour(), (self.any() < chance)[..., None], 2 / FINE)

    def develop(self, light=0.3, noise=0.01):
        """Light the scene, average the fine pixels, add the sensor's noise.

        Returns (n, 48, 48, 3) uint8.
        """
        small = self.image.reshape(self.n, SIZE, 2, SIZE, 2, 3).mean((2, 4))
        return lit(self.rng, small, light, noise)


def lit(rng, images, light=0.3, noise=0.01):
    """Images in [0, 1] under another lamp (brightness, tint, slope) and with noise, as uint8."""
    n, size = len(images), images.shape[1]
    axis = np.linspace(-1, 1, size, dtype=np.float32)
    lamp, tilt = rng.uniform(1 - light, 1 + light, n), rng.uniform(-light, light, (2, n))
    tint = rng.uniform(1 - light / 3, 1 + light / 3, (n, 1, 1, 3))
    slope = (
        1
        + tilt[0][:, None, None] * axis[None, None, :]
        + tilt[1][:, None, None] * axis[None, :, None]
    )
    images = images * (lamp[:, None, None] * slope)[..., None] * tint + rng.normal(
        0, noise, images.shape
    )
    return np.round(255 * np.clip(images, 0, 1)).astype(np.uint8)


def warp(rng, sources, turn, zoom, shift, squeeze=0.0, fine=False):
    """Look at each square source, (n, H, H, c) floats, from another viewpoint: (n, 48, 48, c).

    `turn` in radians, `zoom` = (smallest, largest) share of the source that is seen, `shift` in
    half sources, `squeeze` shears; what lies beyond a source repeats its edge.  `fine`:
    (n, 96, 96, c), not yet averaged.
    """
    n, side = sources.shape[:2]
    u, v = turned(AXIS[None, None, :], AXIS[None, :, None], rng.uniform(-turn, turn, (n, 1, 1)))
    u, v = (
        u + rng.uniform(-squeeze, squeeze, (n, 1, 1)) * v,
        v * rng.uniform(1, 1 + squeeze, (n, 1, 1)),
    )
    seen, right, down = (
        rng.uniform(low, high, (n, 1, 1)) for low, high in (zoom, (-shift, shift), (-shift, shift))
    )
    u, v = (
        np.clip((w + 1) / 2 * side - 0.5, 0, side - 1.001)
        for w in (u * seen + right, v * seen + down)
    )
    i, j = v.astype(int), u.astype(int)
    a, b, row = (v - i)[..., None], (u - j)[..., None], np.arange(n)[:, None, None]
    top = sources[row, i, j] * (1 - b) + sources[row, i, j + 1] * b
    bottom = sources[row, i + 1, j] * (1 - b) + sources[row, i + 1, j + 1] * b
    view = (top * (1 - a) + bottom * a).astype(np.float32)
    return view if fine else view.reshape(n, SIZE, 2, SIZE, 2, -1).mean((2, 4))
