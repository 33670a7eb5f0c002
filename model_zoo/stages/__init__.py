"""One GraphSAGE layer in seven stages: what each takes and gives, its weights, its graphs, and its export."""
