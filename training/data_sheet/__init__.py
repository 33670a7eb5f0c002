"""What data sheets and public measurements teach about GPUs that nobody here owns."""
