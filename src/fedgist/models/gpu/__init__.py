"""What layers compute otherwise on a GPU, equal up to rounding; knows tensors, `core` and the layers, and no model.

A layer asks `convolution` and `pooling`; a model asks `blocks`, which makes one step of several layers.
"""
