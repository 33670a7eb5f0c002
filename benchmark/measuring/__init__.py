"""The measuring loop, and what keeps measurements steady. It knows no kernels, no models and no runtime."""
