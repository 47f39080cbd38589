#!/bin/bash
# Detectors in sizes, and networks of five tasks, on one GPU, in parts that may each be stopped at any time:
#   analysis/task_training/sizes.sh tasks OUT SECONDS     # pose, depth, video, points, RT-DETRv2 and D-FINE beside one another: tasks.md
#   analysis/task_training/sizes.sh train OUT SECONDS     # scenes; float, PTQ and QAT of all sizes beside one another
#   analysis/task_training/sizes.sh engines OUT SECONDS   # INT8 on the engine `cuda` beside fp16; mAP of the files on engines
# Runs lie in $WORK (default /tmp/sizes), on which all parts go on; SPEED=no leaves out the times of `engines`. OUT gets rows, logs, and the files for OpenVINO in parts of 15 MiB:
# cat n.s.m.tar.xz.* | xz -d | tar x
set -u
stage=$1 out=$2 seconds=$3 work=${WORK:-/tmp/sizes} sizes=${SIZES:-n s m l} jobs=() end=$((SECONDS + $3))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1
mkdir -p "$work" "$out"
compress=(gzip -1) && command -v xz > /dev/null && compress=(xz -T8 -1)

left() { echo $((end - SECONDS - $1 > 5 ? end - SECONDS - $1 : 5)); }

study() { timeout -k 5 "$1" python3 -m analysis.task_training.sizes "${@:2}" --data "$work/scenes" --out "$work/runs"; }

pack() { # sizes whose files for OpenVINO are sent back
    (cd "$work/runs" && find $(for size in "$@"; do echo "yolo-scenes-$size"; done) -type f -size -40M \
        \( -name '*.openvino.onnx' -o -name '*.json' -o -name '*.yaml' -o -name '*.csv' -o -name '*.md' -o -name '*.pt' \) \
        ! -path '*/checkpoints/*' 2>/dev/null | tar cf - -T - | "${compress[@]}" | split -b 15M -d - "$out/$(IFS=.; echo "$*").tar.${compress[0]}.")
}

task() { # name, seconds of float training, keys: once more without what a GPU may refuse, if it ends in an error
    local name=$1 given=("${@:3}") code=0
    one() {
        timeout -k 5 "$(left 45)" python3 -m analysis.task_training.run --networks "$name" --seconds "$1" --out "$work/tasks" \
            --scenes "$work/scenes" --set train.precision=bf16 --set bench.engines="[${ENGINES:-openvino,onnxruntime}]" \
            --set quantization.target=[openvino,onnxruntime,tensorrt] --set bench.batch_sizes=[1] --set bench.seconds=0.2 \
            --set bench.runs=5 --set train.checkpoint_every=20 --set qat.checkpoint_every=5 "${given[@]}" "${@:2}" ${MORE:-}
    }
    one "$2" || code=$?
    case $code in
        0 | 124 | 137) ;;
        *) echo "once more" && rm -rf "$work/tasks/$name" &&
            one "$(($2 / 2))" --set train.cuda_graphs=false --set qat.cuda_graphs=false --set qat.fused="'off'" ;;
    esac
}

finish() {
    cp "$work"/tasks/tasks.jsonl "$work"/tasks/tasks.md "$out" 2>/dev/null
    cp "$work"/runs/rows.jsonl "$work"/runs/sizes.md "$work"/speed/cuda_engine.json "$work"/speed/cuda_engine.md "$out" 2>/dev/null
    tail -qn 3 "$work"/*.log > "$out/tails.txt" 2>/dev/null
    ls -l "$out"
}

draw() {
    [ -f "$work/scenes/annotations/instances_val.json" ] || python3 examples/scenes.py "$work/scenes" --train "${TRAIN:-4000}" --val "${VAL:-400}"
    echo "scenes after $SECONDS s"
}

if [ "$stage" = tasks ]; then
    draw
    count=(--set data.train_images="${IMAGES:-8192}" --set data.val_images="${JUDGED:-1024}" --set data.batch_size="${BATCH:-64}")
    graphs=(--set train.cuda_graphs=true --set qat.cuda_graphs=true)
    float=${FLOAT:-$(((seconds - 180) / 3))}
    for name in ${TASKS:-pose depth video points rtdetr dfine}; do
        case $name in
            rtdetr | dfine)
                keys=(--set data.workers="${WORKERS:-4}" --set bench.engines=[openvino,onnxruntime]) each=$((2 * float))
                [ "$name" = rtdetr ] || keys+=(--set model.options.family=d_fine)
                ;;
            points) keys=("${count[@]}" --set model.options.width="${WIDTH:-32}") each=$float ;;
            *) keys=("${count[@]}" "${graphs[@]}" --set model.options.width="${WIDTH:-32}") each=$float ;;
        esac
        task "$name" "$each" "${keys[@]}" > "$work/$name.log" 2>&1 &
        jobs+=($!)
    done
    wait "${jobs[@]}"
    echo "trained after $SECONDS s"
    timeout -k 5 "$(left 5)" python3 -m analysis.task_training.run --intervals --out "$work/tasks"
    grep -h "once more\|^note\|Error" "$work"/*.log > "$out/notes.txt"
elif [ "$stage" = train ]; then
    draw
    for size in $sizes; do
        study "$(left 45)" train --sizes "$size" --seconds "${FLOAT:-$(((seconds - 170) * 10 / 18))}" --set train.precision=bf16 \
            --set data.workers="${WORKERS:-3}" --set bench.engines=[torch] --set bench.seconds=0.2 --set bench.runs=5 \
            --set train.checkpoint_every=10 --set qat.checkpoint_every=2 ${MORE:-} > "$work/$size.log" 2>&1 &
        jobs+=($!)
    done
    wait "${jobs[@]}"
    echo "trained after $SECONDS s"
    pack ${PACK:-n s m}
    for size in $sizes; do
        python3 - "$work/runs/yolo-scenes-$size" <<'END'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
try:
    for row in json.loads((folder / "intervals.json").read_text()):
        print(folder.name, row["variant"], row["engine"], f"{row['value']:.2f} ({row['difference']:+.2f}: {row['difference_low']:+.2f} to {row['difference_high']:+.2f})")
except (OSError, ValueError) as error:
    print(folder.name, "not finished:", error)
END
    done
else
    [ "${SPEED:-yes}" = no ] || timeout -k 5 "$(left 150)" python3 -m analysis.cuda_engine.run --baseline --budget-s "$(left 160)" --prepare-s "$(($(left 160) / 2))" \
        --files "$work/files" --out "$work/speed" --networks $(for size in $sizes; do echo "yolo_$size:32:floats=layers"; done) \
        $(for size in $sizes; do echo "yolo_$size:1:floats=layers"; done) > "$work/speed.log" 2>&1
    grep -v "^{'network'" "$work/speed.log" 2>/dev/null | tail -5
    echo "timed after $SECONDS s"
    cp "$work/speed/plan.json" "$work/runs/plan.json" 2>/dev/null
    pack ${PACK:-l}
    for size in $sizes; do
        study "$(left 35)" judge --engines ${ENGINES:-cuda onnxruntime openvino} --sizes "$size" > "$work/judge-$size.log" 2>&1 &
        jobs+=($!)
    done
    wait "${jobs[@]}"
    study 30 table
fi
finish
