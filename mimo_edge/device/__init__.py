"""The machine a model runs on: which modules there are, what fits, what a Jetson says about itself."""
