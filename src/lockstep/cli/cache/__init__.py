"""List or clear what is kept between runs: built kernels, compiled programs and packed weights."""
