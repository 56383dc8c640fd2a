"""Experiments on top of the library: data, networks, training, figures. Uses the public interface alone."""
