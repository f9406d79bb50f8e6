"""The networks of a Wan checkpoint, as flax nnx modules that are called purely.

Axis letters, the same in every file:

    B  batch (with guidance: branches x items)      A  attention heads
    F  latent frames                                D  head size
    H  latent rows (after patching: rows of tokens) C  width of the transformer or text encoder
    W  latent columns                               M  width of the MLP
    N  video tokens, N = F*H*W                      Z  channels of the latents
    L  text tokens                                  T  pixel frames

Arrays are channels-last: latents [B, F, H, W, Z], frames [B, T, height, width, 3].
"""
