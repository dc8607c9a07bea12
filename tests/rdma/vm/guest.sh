# In the VM, over the host's root: a device, then the command that boot.sh appends.
ip link set lo up
rdma link add rxe0 type rxe netdev lo || exit 93
echo "VM: $(uname -r), $(rdma link show rxe0/1)"
ulimit -l unlimited
# Of Debian's Python packages pyverbs alone is to be seen.
mkdir -p /run/pyverbs
ln -s /usr/lib/python3/dist-packages/pyverbs /run/pyverbs/pyverbs
