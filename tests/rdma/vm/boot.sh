#!/usr/bin/env bash
# Boots a VM with a soft-RoCE device (rxe0) over this machine's own root, read-only under a scratch overlay, and runs
# one command in it: boot.sh [NAME=VALUE…] COMMAND [ARGUMENT…]. The command's exit status is passed through; 77 means
# that the VM cannot be had here, and the last line says why. Debian on x86_64; as root it installs what is missing.
#   KVMESH_VM_CACHE    kernel and boot image (default build/rdma-vm)
#   KVMESH_VM_LIMIT_S  seconds after which the VM is ended (default 1800)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
cache=${KVMESH_VM_CACHE:-$root/build/rdma-vm}
limit=${KVMESH_VM_LIMIT_S:-1800}
packages=(qemu-system-x86 busybox-static kmod rdma-core iproute2 cpio ibverbs-providers python3-pyverbs)
modules=(virtio_pci 9pnet_virtio 9p overlay crc32_generic rdma_rxe ib_uverbs rdma_ucm dummy)

cannot() {
    echo "test-rdma cannot run here: $1" >&2
    exit 77
}

need() { # what the VM needs, by the file that shows it
    for file in /usr/bin/qemu-system-x86_64 /bin/busybox /usr/bin/cpio /usr/lib/python3/dist-packages/pyverbs/qp.*.so; do
        [ -e "$file" ] || return 1
    done
    command -v modprobe >/dev/null && command -v rdma >/dev/null && ls /etc/libibverbs.d/rxe.driver >/dev/null 2>&1
}

[ "$(uname -m)" = x86_64 ] || cannot "the VM is made for x86_64, this is $(uname -m)"
export PATH=$PATH:/usr/sbin:/sbin
if ! need; then
    command -v apt-get >/dev/null || cannot "no apt-get; it needs the Debian packages ${packages[*]}"
    [ "$(id -u)" = 0 ] || cannot "not root; install the Debian packages ${packages[*]}"
    echo "test-rdma: installing ${packages[*]}"
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 install -y -q --no-install-recommends "${packages[@]}"; } \
        >"${TMPDIR:-/tmp}/kvmesh-vm-apt.log" 2>&1 || { tail -5 "${TMPDIR:-/tmp}/kvmesh-vm-apt.log" >&2; cannot "apt-get failed"; }
    need || cannot "the packages are installed, and yet something of them is missing"
fi

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if [ ! -e "$cache/vmlinux" ]; then
    echo "test-rdma: fetching a kernel (it is unpacked, not installed)"
    name=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: \(linux-image-[0-9][^ ]*\).*/\1/p' | head -1)
    if [ -z "$name" ] && [ "$(id -u)" = 0 ]; then
        apt-get update -q >/dev/null || true
        name=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: \(linux-image-[0-9][^ ]*\).*/\1/p' | head -1)
    fi
    [ -n "$name" ] || cannot "apt knows no linux-image-amd64"
    rm -rf "$cache/kernel" && mkdir -p "$cache/kernel"
    (cd "$cache" && apt-get download -q "$name" >/dev/null 2>&1) || cannot "apt-get download $name failed"
    dpkg -x "$cache/$name"_*.deb "$cache/kernel"
    rm -f "$cache/$name"_*.deb
    # An ELF kernel starts by PVH and spares the guest its own, emulated, unpacking.
    python3 "$here/unpack_kernel.py" "$cache"/kernel/boot/vmlinuz-* "$cache/vmlinux.part"
    mv "$cache/vmlinux.part" "$cache/vmlinux"
fi

release=$(ls "$cache/kernel/lib/modules")
if [ ! -e "$cache/base.cpio" ] || [ "$here/init" -nt "$cache/base.cpio" ]; then
    image=$cache/image
    rm -rf "$image" && mkdir -p "$image/bin" "$image/modules"
    depmod -b "$cache/kernel" "$release"
    for module in "${modules[@]}"; do
        modprobe -d "$cache/kernel" -S "$release" --show-depends "$module"
    done | awk '$1 == "insmod" && !seen[$2]++ {print $2}' >"$image/paths"
    while read -r path; do
        cp "$path" "$image/modules/"
        basename "$path"
    done <"$image/paths" >"$image/modules/order"
    rm "$image/paths"
    cp /bin/busybox "$image/bin/busybox"
    cp "$here/init" "$image/init"
    chmod +x "$image/init"
    (cd "$image" && find . | cpio -o -H newc -R 0:0 --quiet) >"$cache/base.cpio.part"
    mv "$cache/base.cpio.part" "$cache/base.cpio"
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/kvmesh-vm.XXXXXX")
trap 'rm -rf "$work"' EXIT
flock -u 9
mkdir "$work/extra"
{
    cat "$here/guest.sh"
    printf 'cd %q\nexec env -i HOME=/root LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin' "$root"
    printf ' %q' "$@"
    echo
} >"$work/extra/guest.sh"
(cd "$work/extra" && echo guest.sh | cpio -o -H newc -R 0:0 --quiet) >"$work/extra.cpio"
cat "$cache/base.cpio" "$work/extra.cpio" >"$work/initrd"

echo "test-rdma: booting"
status=0
timeout --foreground "$limit" qemu-system-x86_64 \
    -accel tcg,thread=multi,tb-size=512 -M q35 -cpu max -smp 2 -m 2048 -nodefaults -no-reboot -nographic \
    -kernel "$cache/vmlinux" -initrd "$work/initrd" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr tsc=reliable random.trust_cpu=on" \
    -fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap -device virtio-9p-pci,fsdev=host,mount_tag=host \
    -serial stdio </dev/null | stdbuf -oL tr -d "\r" | tee "$work/log" || status=$?
result=$(sed -n 's/^KVMESH-VM-EXIT \([0-9]*\)$/\1/p' "$work/log" | tail -1)
if [ -z "$result" ]; then
    echo "test-rdma: the VM ended without a result (status $status; 124 is the limit of $limit s)" >&2
    exit 1
fi
exit "$result"
