// The index of a problem: who makes a value, and who reads it.
#include "core/problem.h"

namespace rekindle {

void Problem::index() {
    producer.assign(size.size(), -1);
    std::vector<std::size_t> count(size.size() + 1, 0);
    for (Id i = 0; i < num_ops(); ++i) {
        for (Id v : outputs[i]) producer[static_cast<std::size_t>(v)] = i;
        for (Id v : inputs[i]) ++count[static_cast<std::size_t>(v) + 1];
    }
    // Counting sort: the readers of a value come in the order of their ids.
    for (std::size_t v = 1; v < count.size(); ++v) count[v] += count[v - 1];
    readers.start = count;
    readers.ids.resize(count.back());
    for (Id i = 0; i < num_ops(); ++i)
        for (Id v : inputs[i]) readers.ids[count[static_cast<std::size_t>(v)]++] = i;
}

}  // namespace rekindle
