import comfy.model_management as mm

offload_device = mm.unet_offload_device()


def rest(block):
    block.to(offload_device)
    return block.weight.device
