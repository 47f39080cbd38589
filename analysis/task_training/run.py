"""Trains, quantizes and measures networks of segmentation, detection and super-resolution through their recipes."""

from analysis.common.recipes import RecipeRun, run_all, write_table
from analysis.common.study import study_parser

RECIPES = {
    "rfdn": ("super-resolution", "photographs"),
    "lraspp": ("lraspp-camvid", "camvid"),
    "fcn_resnet50": ("fcn_resnet50-camvid", "camvid"),
    "deeplabv3": ("deeplabv3-camvid", "camvid"),
    "yolo": ("yolo-bccd", "bccd"),
    "ssdlite": ("ssdlite-bccd", "bccd"),
    "retinanet": ("retinanet-bccd", "bccd"),
}


def main() -> None:
    parser = study_parser(__doc__, out="runs/task_training")
    parser.add_argument("--camvid", default="camvid", help="folder of CamVid")
    parser.add_argument("--bccd", default="bccd", help="folder of BCCD")
    parser.add_argument("--photographs", default="photographs", help="folder of images for super-resolution")
    parser.add_argument("--networks", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--set", action="append", default=[], help="key=value for every recipe")
    o = parser.parse_args()
    runs = [
        RecipeRun(label=name, recipe=recipe, command="qat", overrides=[f"data.root={vars(o)[data]}", *o.set])
        for name, (recipe, data) in RECIPES.items()
        if name in o.networks
    ]
    print(
        write_table(
            "INT8 in segmentation, detection and super-resolution", run_all(runs, o.out), o.out / "task_training.md"
        )
    )


if __name__ == "__main__":
    main()
