"""TensorRT plugins for the `mimo` ops of the TensorRT form, and what builds and reads engines with them."""
