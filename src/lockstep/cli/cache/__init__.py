"""List or clear what is kept between runs: built kernels and compiled programs."""
