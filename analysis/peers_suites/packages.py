"""Networks of packages of the registry, most of them small, with random weights."""

# What is tried: the module that has it, the call that makes it, and the shape of an image, or of each input.
PACKAGES: dict[str, tuple[str, str, list[tuple[int, ...]]]] = {
    "vit-pytorch vit": (
        "vit_pytorch.vit",
        "ViT(image_size=64, patch_size=16, dim=64, depth=2, heads=4, mlp_dim=128, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch simple": (
        "vit_pytorch.simple_vit",
        "SimpleViT(image_size=64, patch_size=16, dim=64, depth=2, heads=4, mlp_dim=128, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch simple_rms": (
        "vit_pytorch.simple_vit_with_register_tokens",
        "SimpleViT(image_size=64, patch_size=16, dim=64, depth=2, heads=4, mlp_dim=128, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch deepvit": (
        "vit_pytorch.deepvit",
        "DeepViT(image_size=64, patch_size=16, dim=64, depth=2, heads=4, mlp_dim=128, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch cait": (
        "vit_pytorch.cait",
        "CaiT(image_size=64, patch_size=16, dim=64, depth=2, cls_depth=1, heads=4, mlp_dim=128, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch t2t": (
        "vit_pytorch.t2t",
        "T2TViT(dim=64, image_size=64, depth=2, heads=4, mlp_dim=128, t2t_layers=((7, 4), (3, 2), (3, 2)), "
        "num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch cct": (
        "vit_pytorch.cct",
        "CCT(img_size=(64, 64), embedding_dim=64, n_conv_layers=2, kernel_size=7, stride=2, padding=3, "
        "pooling_kernel_size=3, pooling_stride=2, pooling_padding=1, num_layers=2, num_heads=4, "
        'mlp_ratio=2.0, positional_embedding="learnable", num_classes=10)',
        [(3, 64, 64)],
    ),
    "vit-pytorch cross": (
        "vit_pytorch.cross_vit",
        "CrossViT(image_size=64, depth=2, sm_dim=32, sm_patch_size=16, sm_enc_depth=1, sm_enc_heads=4, "
        "sm_enc_mlp_dim=64, lg_dim=48, lg_patch_size=32, lg_enc_depth=1, lg_enc_heads=4, lg_enc_mlp_dim=64, "
        "cross_attn_depth=1, cross_attn_heads=4, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch pit": (
        "vit_pytorch.pit",
        "PiT(image_size=64, patch_size=8, dim=32, depth=(1, 1, 1), heads=4, mlp_dim=64, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch levit": (
        "vit_pytorch.levit",
        "LeViT(image_size=64, stages=3, dim=(32, 48, 64), depth=1, heads=(2, 4, 4), mlp_mult=2, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch cvt": (
        "vit_pytorch.cvt",
        "CvT(s1_emb_dim=32, s2_emb_dim=48, s3_emb_dim=64, s3_depth=1, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch twins": (
        "vit_pytorch.twins_svt",
        "TwinsSVT(s1_emb_dim=32, s1_patch_size=4, s1_local_patch_size=4, s1_global_k=4, s2_emb_dim=48, "
        "s2_local_patch_size=2, s2_global_k=4, s3_emb_dim=64, s3_local_patch_size=2, s3_global_k=2, "
        "s3_depth=1, s4_emb_dim=64, s4_local_patch_size=1, s4_global_k=1, s4_depth=1, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch regionvit": (
        "vit_pytorch.regionvit",
        "RegionViT(dim=(32, 48, 64, 96), depth=(1, 1, 1, 1), window_size=2, num_classes=10)",
        [(3, 128, 128)],
    ),
    "vit-pytorch crossformer": (
        "vit_pytorch.crossformer",
        "CrossFormer(dim=(32, 48, 64, 96), depth=(1, 1, 1, 1), global_window_size=(4, 2, 2, 1), "
        "local_window_size=2, num_classes=10)",
        [(3, 128, 128)],
    ),
    "vit-pytorch scalable": (
        "vit_pytorch.scalable_vit",
        "ScalableViT(dim=32, heads=(2, 2, 2, 2), depth=(1, 1, 1, 1), ssa_dim_key=(16, 16, 16, 16), "
        "reduction_factor=(4, 2, 1, 1), window_size=(4, 4, None, None), num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch maxvit": (
        "vit_pytorch.max_vit",
        "MaxViT(dim=32, dim_conv_stem=16, dim_head=16, depth=(1, 1), window_size=4, mbconv_expansion_rate=2, "
        "mbconv_shrinkage_rate=0.25, dropout=0.1, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch nest": (
        "vit_pytorch.nest",
        "NesT(image_size=64, patch_size=4, dim=32, heads=2, num_hierarchies=3, block_repeats=(1, 1, 1), "
        "num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch mobilevit": (
        "vit_pytorch.mobile_vit",
        "MobileViT(image_size=(64, 64), dims=[32, 48, 64], channels=[8, 8, 16, 16, 24, 24, 32, 32, 48, 48, "
        "64], num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch xcit": (
        "vit_pytorch.xcit",
        "XCiT(image_size=64, patch_size=16, dim=64, depth=2, cls_depth=1, heads=4, mlp_dim=128, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch smalldata": (
        "vit_pytorch.vit_for_small_dataset",
        "ViT(image_size=64, patch_size=16, dim=64, depth=2, heads=4, mlp_dim=128, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch parallel": (
        "vit_pytorch.parallel_vit",
        "ViT(num_parallel_branches=2, image_size=64, patch_size=16, dim=64, depth=2, heads=4, mlp_dim=128, "
        "num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch rvt": (
        "vit_pytorch.rvt",
        "RvT(image_size=64, patch_size=16, dim=64, depth=2, heads=4, mlp_dim=128, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch ats": (
        "vit_pytorch.ats_vit",
        "ViT(max_tokens_per_depth=(8, 4), image_size=64, patch_size=16, dim=64, depth=2, heads=4, "
        "mlp_dim=128, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch lookvit": (
        "vit_pytorch.look_vit",
        "LookViT(dim=64, image_size=64, depth=1, heads=2, dim_head=16, patch_size=16, highres_patch_size=8, "
        "highres_mlp_factor=2, cross_attn_heads=2, cross_attn_dim_head=16, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch normvit": (
        "vit_pytorch.normalized_vit",
        "nViT(image_size=64, patch_size=16, dim=64, depth=2, heads=4, mlp_dim=128, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch patchmerger": (
        "vit_pytorch.vit_with_patch_merger",
        "ViT(patch_merge_layer=1, patch_merge_num_tokens=4, image_size=64, patch_size=16, dim=64, depth=2, "
        "heads=4, mlp_dim=128, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch qknorm": (
        "vit_pytorch.simple_vit_with_qk_norm",
        "SimpleViT(image_size=64, patch_size=16, dim=64, depth=2, heads=4, mlp_dim=128, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch fft": (
        "vit_pytorch.simple_vit_with_fft",
        "SimpleViT(image_size=64, patch_size=16, freq_patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128, "
        "num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch uvit": (
        "vit_pytorch.simple_uvit",
        "SimpleUViT(image_size=64, patch_size=16, dim=64, depth=2, heads=4, mlp_dim=128, "
        "num_register_tokens=4, num_classes=10)",
        [(3, 64, 64)],
    ),
    "vit-pytorch 3d": (
        "vit_pytorch.vit_3d",
        "ViT(image_size=32, frames=4, image_patch_size=16, frame_patch_size=2, dim=64, depth=2, heads=4, "
        "mlp_dim=128, num_classes=10)",
        [(3, 4, 32, 32)],
    ),
    "vit-pytorch 1d": (
        "vit_pytorch.vit_1d",
        "ViT(seq_len=64, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128, num_classes=10)",
        [(3, 64)],
    ),
    "segmentation-models-pytorch Unet": (
        "segmentation_models_pytorch",
        'Unet(encoder_name="resnet18", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch UnetPlusPlus": (
        "segmentation_models_pytorch",
        'UnetPlusPlus(encoder_name="resnet18", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch MAnet": (
        "segmentation_models_pytorch",
        'MAnet(encoder_name="resnet18", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch Linknet": (
        "segmentation_models_pytorch",
        'Linknet(encoder_name="resnet18", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch FPN": (
        "segmentation_models_pytorch",
        'FPN(encoder_name="resnet18", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch PSPNet": (
        "segmentation_models_pytorch",
        'PSPNet(encoder_name="resnet18", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch DeepLabV3": (
        "segmentation_models_pytorch",
        'DeepLabV3(encoder_name="resnet18", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch DeepLabV3Plus": (
        "segmentation_models_pytorch",
        'DeepLabV3Plus(encoder_name="resnet18", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch UPerNet": (
        "segmentation_models_pytorch",
        'UPerNet(encoder_name="resnet18", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch Segformer": (
        "segmentation_models_pytorch",
        'Segformer(encoder_name="resnet18", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch Unet_mit": (
        "segmentation_models_pytorch",
        'Unet(encoder_name="mit_b0", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch Unet_scse": (
        "segmentation_models_pytorch",
        'Unet(encoder_name="resnet18", encoder_weights=None, classes=4, decoder_attention_type="scse")',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch Unet_effb0": (
        "segmentation_models_pytorch",
        'Unet(encoder_name="efficientnet-b0", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch Unet_mobileone": (
        "segmentation_models_pytorch",
        'Unet(encoder_name="mobileone_s0", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch Unet_vgg": (
        "segmentation_models_pytorch",
        'Unet(encoder_name="vgg11_bn", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch Unet_dpn": (
        "segmentation_models_pytorch",
        'FPN(encoder_name="dpn68", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch Unet_xception": (
        "segmentation_models_pytorch",
        'Unet(encoder_name="xception", encoder_weights=None, classes=4)',
        [(3, 64, 64)],
    ),
    "segmentation-models-pytorch DPT": (
        "segmentation_models_pytorch",
        'DPT(encoder_name="tu-vit_tiny_patch16_224", encoder_weights=None, classes=4, dynamic_img_size=True)',
        [(3, 224, 224)],
    ),
    "monai UNet2": (
        "monai.networks.nets",
        "UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=2)",
        [(1, 32, 32)],
    ),
    "monai UNet3": (
        "monai.networks.nets",
        "UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=2)",
        [(1, 16, 16, 16)],
    ),
    "monai AttentionUnet": (
        "monai.networks.nets",
        "AttentionUnet(spatial_dims=2, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2))",
        [(1, 32, 32)],
    ),
    "monai DynUNet": (
        "monai.networks.nets",
        "DynUNet(spatial_dims=2, in_channels=1, out_channels=2, kernel_size=[3, 3, 3], strides=[1, 2, 2], "
        "upsample_kernel_size=[2, 2], filters=[8, 16, 32])",
        [(1, 32, 32)],
    ),
    "monai SegResNet": (
        "monai.networks.nets",
        "SegResNet(spatial_dims=3, init_filters=8, in_channels=1, out_channels=2)",
        [(1, 16, 16, 16)],
    ),
    "monai VNet": (
        "monai.networks.nets",
        "VNet(spatial_dims=2, in_channels=1, out_channels=2)",
        [(1, 32, 32)],
    ),
    "monai UNETR": (
        "monai.networks.nets",
        "UNETR(in_channels=1, out_channels=2, img_size=(32, 32), spatial_dims=2, feature_size=8, "
        "hidden_size=48, mlp_dim=96, num_heads=4)",
        [(1, 32, 32)],
    ),
    "monai SwinUNETR": (
        "monai.networks.nets",
        "SwinUNETR(in_channels=1, out_channels=2, feature_size=12, spatial_dims=2, window_size=4)",
        [(1, 64, 64)],
    ),
    "monai DenseNet": (
        "monai.networks.nets",
        "DenseNet121(spatial_dims=2, in_channels=1, out_channels=3)",
        [(1, 64, 64)],
    ),
    "monai HighRes": (
        "monai.networks.nets",
        "HighResNet(spatial_dims=2, in_channels=1, out_channels=2)",
        [(1, 32, 32)],
    ),
    "monai BasicUNetPP": (
        "monai.networks.nets",
        "BasicUNetPlusPlus(spatial_dims=2, in_channels=1, out_channels=2, features=(8, 8, 16, 16, 32, 8))",
        [(1, 32, 32)],
    ),
    "monai FlexibleUNet": (
        "monai.networks.nets",
        'FlexibleUNet(in_channels=3, out_channels=2, backbone="efficientnet-b0", spatial_dims=2)',
        [(3, 64, 64)],
    ),
    "monai Autoencoder": (
        "monai.networks.nets",
        "AutoEncoder(spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 16), strides=(2, 2))",
        [(1, 32, 32)],
    ),
    "monai ViT": (
        "monai.networks.nets",
        "ViT(in_channels=1, img_size=(32, 32), patch_size=(8, 8), spatial_dims=2, hidden_size=48, mlp_dim=96, "
        "num_layers=2, num_heads=4, classification=True)",
        [(1, 32, 32)],
    ),
    "monai MedNeXt": (
        "monai.networks.nets",
        "MedNeXt(spatial_dims=2, in_channels=1, out_channels=2, init_filters=8)",
        [(1, 64, 64)],
    ),
    "monai SENet": (
        "monai.networks.nets",
        "SEResNet50(spatial_dims=2, in_channels=3, num_classes=3)",
        [(3, 64, 64)],
    ),
    "spandrel RRDB": (
        "spandrel.architectures.ESRGAN.__arch.RRDB",
        "RRDBNet(in_nc=3, out_nc=3, num_filters=16, num_blocks=2, scale=2)",
        [(3, 24, 24)],
    ),
    "spandrel Compact": (
        "spandrel.architectures.Compact.__arch.SRVGG",
        "SRVGGNetCompact(num_feat=16, num_conv=4, upscale=2)",
        [(3, 24, 24)],
    ),
    "spandrel SwinIR": (
        "spandrel.architectures.SwinIR.__arch.SwinIR",
        "SwinIR(img_size=16, window_size=8, embed_dim=24, depths=[2], num_heads=[2], upscale=2, "
        'upsampler="pixelshuffle")',
        [(3, 16, 16)],
    ),
    "spandrel Swin2SR": (
        "spandrel.architectures.Swin2SR.__arch.Swin2SR",
        "Swin2SR(img_size=16, window_size=8, embed_dim=24, depths=[2], num_heads=[2], upscale=2, "
        'upsampler="pixelshuffle")',
        [(3, 16, 16)],
    ),
    "spandrel OmniSR": (
        "spandrel.architectures.OmniSR.__arch.OmniSR",
        "OmniSR(num_feat=16, window_size=8, res_num=1, up_scale=2, block_num=1)",
        [(3, 16, 16)],
    ),
    "spandrel SPAN": (
        "spandrel.architectures.SPAN.__arch.span",
        "SPAN(num_in_ch=3, num_out_ch=3, feature_channels=16, upscale=2)",
        [(3, 16, 16)],
    ),
    "spandrel PLKSR": (
        "spandrel.architectures.PLKSR.__arch.PLKSR",
        "PLKSR(dim=16, n_blocks=2, upscaling_factor=2)",
        [(3, 16, 16)],
    ),
    "spandrel SAFMN": (
        "spandrel.architectures.SAFMN.__arch.safmn",
        "SAFMN(dim=16, n_blocks=2, upscaling_factor=2)",
        [(3, 16, 16)],
    ),
    "spandrel NAFNet": (
        "spandrel.architectures.NAFNet.__arch.NAFNet_arch",
        "NAFNet(width=8, middle_blk_num=1, enc_blk_nums=[1, 1], dec_blk_nums=[1, 1])",
        [(3, 32, 32)],
    ),
    "spandrel Uformer": (
        "spandrel.architectures.Uformer.__arch.Uformer",
        "Uformer(img_size=32, embed_dim=8, depths=[1, 1, 1, 1, 1, 1, 1, 1, 1], win_size=4)",
        [(3, 64, 64)],
    ),
    "spandrel DITN": (
        "spandrel.architectures.DITN.__arch.DITN_Real",
        "DITN_Real(dim=16, ITL_blocks=1, SAL_blocks=1, UFONE_blocks=1, patch_size=8, upscale=2)",
        [(3, 16, 16)],
    ),
    "spandrel GRL": (
        "spandrel.architectures.GRL.__arch.grl",
        "GRL(img_size=16, embed_dim=24, depths=[2], num_heads_window=[2], num_heads_stripe=[2], "
        'window_size=8, stripe_size=[8, 8], upscale=2, upsampler="pixelshuffle")',
        [(3, 16, 16)],
    ),
    "kornia HardNet": (
        "kornia.feature",
        "HardNet(pretrained=False)",
        [(1, 32, 32)],
    ),
    "kornia SOSNet": (
        "kornia.feature",
        "SOSNet(pretrained=False)",
        [(1, 32, 32)],
    ),
    "kornia TFeat": (
        "kornia.feature",
        "TFeat(pretrained=False)",
        [(1, 32, 32)],
    ),
    "kornia HyNet": (
        "kornia.feature",
        "HyNet(pretrained=False)",
        [(1, 32, 32)],
    ),
    "kornia VggLike": (
        "kornia.feature",
        "SOLD2_detector(pretrained=False)",
        [(1, 64, 64)],
    ),
    "pytorchvideo x3d": (
        "pytorchvideo.models.x3d",
        "create_x3d(input_clip_length=4, input_crop_size=64, model_num_class=5)",
        [(3, 4, 64, 64)],
    ),
    "pytorchvideo resnet": (
        "pytorchvideo.models",
        "create_resnet(model_num_class=5, head_pool_kernel_size=(4, 2, 2), model_depth=50)",
        [(3, 4, 64, 64)],
    ),
    "vit-pytorch vivit": (
        "vit_pytorch.vivit",
        "ViViT(image_size=32, frames=4, image_patch_size=16, frame_patch_size=2, dim=64, spatial_depth=1, "
        "temporal_depth=1, heads=4, mlp_dim=128, num_classes=10)",
        [(3, 4, 32, 32)],
    ),
    "vit-pytorch sepvit": (
        "vit_pytorch.sep_vit",
        "SepViT(dim=32, dim_head=16, heads=(1, 2, 4, 4), depth=(1, 1, 1, 1), window_size=7, num_classes=10)",
        [(3, 224, 224)],
    ),
    "segmentation-models-pytorch PAN": (
        "segmentation_models_pytorch",
        'PAN(encoder_name="resnet18", encoder_weights=None, classes=4)',
        [(3, 128, 128)],
    ),
    "spandrel HAT": (
        "spandrel.architectures.HAT.__arch.HAT",
        "HAT(img_size=16, window_size=8, embed_dim=60, depths=(2,), num_heads=(6,), upscale=2, "
        'upsampler="pixelshuffle")',
        [(3, 16, 16)],
    ),
    "spandrel DAT": (
        "spandrel.architectures.DAT.__arch.DAT",
        "DAT(img_size=16, embed_dim=60, split_size=[8, 8], depth=[2], num_heads=[6], upscale=2)",
        [(3, 16, 16)],
    ),
    "spandrel SCUNet": (
        "spandrel.architectures.SCUNet.__arch.SCUNet",
        "SCUNet(config=[1, 1, 1, 1, 1, 1, 1], dim=64, input_resolution=64)",
        [(3, 64, 64)],
    ),
    "open_clip ViT": (
        "open_clip.transformer",
        "VisionTransformer(image_size=64, patch_size=16, width=64, layers=2, heads=4, mlp_ratio=4.0, output_dim=32)",
        [(3, 64, 64)],
    ),
    "open_clip RN": (
        "open_clip.modified_resnet",
        "ModifiedResNet(layers=[1, 1, 1, 1], output_dim=32, heads=4, image_size=64, width=16)",
        [(3, 64, 64)],
    ),
    "effdet lite0": (
        "effdet",
        'create_model(model_name="tf_efficientdet_lite0", pretrained=False, pretrained_backbone=False, '
        "image_size=[128, 128], num_classes=4)",
        [(3, 128, 128)],
    ),
    "facenet-pytorch InceptionResnetV1": (
        "facenet_pytorch",
        "InceptionResnetV1(pretrained=None, classify=True, num_classes=8)",
        [(3, 96, 96)],
    ),
    "lpips alex": (
        "lpips",
        'LPIPS(pretrained=False, net="alex", pnet_rand=True, verbose=False)',
        [(3, 64, 64), (3, 64, 64)],
    ),
    "torchxrayvision densenet": (
        "torchxrayvision.models",
        "DenseNet(weights=None, num_classes=5)",
        [(1, 64, 64)],
    ),
    "pretrainedmodels bninception": (
        "pretrainedmodels",
        "bninception(num_classes=1000, pretrained=None)",
        [(3, 224, 224)],
    ),
    "pretrainedmodels se_resnet50": (
        "pretrainedmodels",
        "se_resnet50(num_classes=1000, pretrained=None)",
        [(3, 224, 224)],
    ),
    "pretrainedmodels xception": (
        "pretrainedmodels",
        "xception(num_classes=1000, pretrained=None)",
        [(3, 224, 224)],
    ),
    "efficientnet_pytorch b0": (
        "efficientnet_pytorch",
        'EfficientNet.from_name(model_name="efficientnet-b0", num_classes=5, image_size=64)',
        [(3, 64, 64)],
    ),
}
