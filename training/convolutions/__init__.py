"""What is learned from the times of convolution algorithms: which one is best for a layer, and how long each takes."""
