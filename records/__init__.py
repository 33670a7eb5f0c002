"""What files hold: kernels and models, measurements and datasets. One schema for each kind of file, for writer and reader."""
