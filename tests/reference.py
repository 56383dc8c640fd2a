"""The definitions, evaluated with mpmath at a precision where no cancellation matters.

Shares no code and no formula rearrangement with the package: the textbook forms, in 80 digits.
"""

from dataclasses import dataclass

from mpmath import mp, mpf

mp.dps = 80


def _phi(z):
    return mp.exp(-z * z / 2) / mp.sqrt(2 * mp.pi)


def _mass(a, b):
    """Φ(b) - Φ(a), from the tail that keeps relative precision."""
    if a > 0:
        return (mp.erfc(a / mp.sqrt(2)) - mp.erfc(b / mp.sqrt(2))) / 2
    if b < 0:
        return _mass(-b, -a)
    return 1 - mp.erfc(-a / mp.sqrt(2)) / 2 - mp.erfc(b / mp.sqrt(2)) / 2


@dataclass
class Reference:
    """One truncated log-normal."""

    mu: float
    log_sigma: float
    log_a: float = -20.0
    log_b: float = 0.0

    def __post_init__(self):
        self.m, self.A, self.B = mpf(self.mu), mpf(self.log_a), mpf(self.log_b)
        self.s = mp.exp(mpf(self.log_sigma))
        self.alpha, self.beta = (self.A - self.m) / self.s, (self.B - self.m) / self.s
        self.z = _mass(self.alpha, self.beta)

    def kl(self):
        edges = (self.alpha * _phi(self.alpha) - self.beta * _phi(self.beta)) / (2 * self.z)
        return mp.log(self.B - self.A) - mp.log(self.s * self.z * mp.sqrt(2 * mp.pi * mp.e)) - edges

    def log_moment(self, k):
        tilted = _mass(self.alpha - k * self.s, self.beta - k * self.s)
        return k * self.m + mpf(k) ** 2 * self.s**2 / 2 + mp.log(tilted / self.z)

    def mean(self):
        return mp.exp(self.log_moment(1))

    def log_mean(self):
        return self.log_moment(1)

    def snr(self):
        return 1 / mp.sqrt(mp.expm1(self.log_moment(2) - 2 * self.log_moment(1)))

    def log_mass(self, lo, hi):
        ends = [(mp.log(mpf(end)) - self.m) / self.s for end in (lo, hi)]
        return mp.log(_mass(*ends) / self.z)

    def interval(self, p1, p2):
        lo, hi = mpf(2) ** -mpf(p2), mpf(2) ** -mpf(p1)
        return self.log_mass(lo, hi) + mp.log((self.B - self.A) / mp.log(hi / lo))

    def spike(self, scale=1e-6):
        """∫ N(x; μ, σ²) N(x; A, s²) over [A, B], by completing the square."""
        s = mpf(scale)
        total = self.s**2 + s**2
        m = (self.m * s**2 + self.A * self.s**2) / total
        d = self.s * s / mp.sqrt(total)
        product = _phi((self.A - self.m) / mp.sqrt(total)) / mp.sqrt(total)
        product *= _mass((self.A - m) / d, (self.B - m) / d)
        return mp.log((self.B - self.A) * product / (self.z * _mass(mpf(0), (self.B - self.A) / s)))

    def log_density(self, x):
        """Of x = log θ."""
        return mp.log(_phi((mpf(x) - self.m) / self.s) / (self.s * self.z))

    def cdf(self, x):
        return _mass(self.alpha, (mpf(x) - self.m) / self.s) / self.z

    def quantile_gradient(self, x):
        """∂x/∂μ and ∂x/∂log σ at fixed cdf(x), by central differences in 80 digits."""
        h = mpf(10) ** -25
        slope = _phi((mpf(x) - self.m) / self.s) / (self.s * self.z)

        def moved(d_mu, d_log_sigma):
            other = Reference(self.m + d_mu, mpf(self.log_sigma) + d_log_sigma, self.log_a, self.log_b)
            return other.cdf(x)

        by_mu = (moved(h * self.s, 0) - moved(-h * self.s, 0)) / (2 * h * self.s)
        by_log_sigma = (moved(0, h) - moved(0, -h)) / (2 * h)
        return -by_mu / slope, -by_log_sigma / slope

    def kl_gradient(self):
        h = mpf(10) ** -25

        def at(d_mu, d_log_sigma):
            return Reference(self.m + d_mu, mpf(self.log_sigma) + d_log_sigma, self.log_a, self.log_b).kl()

        by_mu = (at(h * self.s, 0) - at(-h * self.s, 0)) / (2 * h * self.s)
        return by_mu, (at(0, h) - at(0, -h)) / (2 * h)
